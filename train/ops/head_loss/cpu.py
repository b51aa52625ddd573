"""The head's losses of rows of logits on CPU, compiled by numba: statistics and gradient of a row while it is in the
cache.

bf16 or fp32 logits, whose place the gradient takes; arithmetic in fp32. `reference` has the definitions. Drafting at
temperature 1 in the bonus loss is not done here.

n rows, H hidden, V draft vocabulary, P positions with a teacher.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor
from torch.nn import functional as F

from infer.kernels.numba_scalars import (
    FAST,
    LOWEST,
    exp,
    from_order,
    inlined,
    narrow_bf16,
    narrow_fp16,
    pointer,
    same,
    to_order,
    widen_bf16,
    widen_fp16,
)
from train.ops.head_loss.terms import LossOptions, PredictionStats, Teacher

COLUMNS = len(PredictionStats._fields)
ROWS = 1024  # each stays in the cache by itself; fewer at a time would add to the head's gradient more often


def available(logits: Tensor, probs: Tensor) -> bool:
    """Whether the kernel takes these devices and dtypes."""
    return logits.device.type == "cpu" and probs.device.type == "cpu" and (logits.dtype, probs.dtype) in _KERNELS


def rows_at_once(vocab: int, bytes_each: int) -> int:
    """How many rows of logits to hold at a time."""
    del vocab, bytes_each
    return ROWS


def chunk(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Columns of `PredictionStats`, fp32 [n, C], and the gradient of the loss over the logits, [n, V] in the dtype of
    `hidden`.
    """
    logits = F.linear(hidden_nH, head_VH)
    return of_logits(logits, teacher, rows_n, base_n, bonus_n, options), logits


def of_logits(
    logits_nV: Tensor, teacher: Teacher, rows_n: Tensor, base_n: Tensor, bonus_n: Tensor | None, options: LossOptions
) -> Tensor:
    """Columns of `PredictionStats`, fp32 [n, C]; the gradient of the loss takes the place of `logits`."""
    n, vocab = logits_nV.shape
    stats = torch.empty(n, COLUMNS)
    scales = torch.stack((base_n, torch.zeros_like(base_n) if bonus_n is None else bonus_n), dim=1).float()
    own = (teacher.best[rows_n], teacher.inside[rows_n])
    tensors = (logits_nV, teacher.probs, rows_n, *own, scales, stats)
    assert all(t.is_contiguous() for t in tensors), [t.stride() for t in tensors]
    weights = (options.cross_entropy, options.total_variation, bonus_n is not None, options.fan_out)
    kernel = _KERNELS[logits_nV.dtype, teacher.probs.dtype]
    kernel(*(t.data_ptr() for t in tensors), n, vocab, len(teacher.probs), *weights)
    return stats


def probabilities(logits_nV: Tensor, normaliser_n: Tensor, out_nV: Tensor) -> None:
    """Write exp(logit - normaliser) to `out`, fp16; the normaliser is fp32."""
    tensors = (logits_nV, normaliser_n, out_nV)
    assert all(t.is_contiguous() for t in tensors) and out_nV.shape == logits_nV.shape, [
        (t.shape, t.stride()) for t in tensors
    ]
    assert (normaliser_n.dtype, out_nV.dtype) == (torch.float32, torch.float16), (normaliser_n.dtype, out_nV.dtype)
    _PROBABILITIES[logits_nV.dtype](*(t.data_ptr() for t in tensors), *logits_nV.shape)


def _build_probabilities(element: Any, widen: Any) -> Any:
    @inlined
    def one_row(z_V: Any, normaliser: Any, out_V: Any) -> None:
        for i in range(len(z_V)):
            out_V[i] = narrow_fp16(exp(widen(z_V[i]) - normaliser))

    @njit(cache=True, **FAST)
    def rows(logits: int, normaliser: int, out: int, n: int, vocab: int) -> None:
        z_nV, out_nV = carray(pointer(logits), (n, vocab), element), carray(pointer(out), (n, vocab), np.uint16)
        normaliser_n = carray(pointer(normaliser), (n,), np.float32)
        for i in range(n):
            one_row(z_nV[i], normaliser_n[i], out_nV[i])

    return rows


def _build(element: Any, widen: Any, narrow: Any, prob_element: Any, widen_prob: Any) -> Any:
    @inlined
    def first_pass(z_V: Any, p_V: Any, out_V: Any, best: Any) -> Any:
        """Logits and probabilities as fp32 in `out` [2, V]; the highest logit, the teacher's mass, sum p z, and how
        many exceed z[best].
        """
        highest, mass, product = LOWEST, np.float32(0.0), np.float32(0.0)
        above, threshold = np.float32(0.0), widen(z_V[best])
        for i in range(len(z_V)):
            z, p = widen(z_V[i]), widen_prob(p_V[i])
            out_V[0, i] = z
            out_V[1, i] = p
            highest = max(highest, to_order(z))
            mass += p
            product += p * z
            above += np.float32(1.0) if z > threshold else np.float32(0.0)
        return from_order(highest), mass, product, above

    @inlined
    def exponentials(row_2V: Any, highest: Any) -> Any:
        total = np.float32(0.0)
        for i in range(row_2V.shape[1]):
            e = exp(row_2V[0, i] - highest)
            row_2V[0, i] = e
            total += e
        return total

    @inlined
    def overlaps(row_2V: Any, share: Any) -> Any:
        """sum min(p, q), and sum q where q < p; q = e * share."""
        common, below = np.float32(0.0), np.float32(0.0)
        for i in range(row_2V.shape[1]):
            q, p = row_2V[0, i] * share, row_2V[1, i]
            common += min(p, q)
            below += q if q < p else np.float32(0.0)
        return common, below

    @inlined
    def place_of_top(row_2V: Any) -> Any:
        """The first place whose exponential is that of 0."""
        place = np.int32(row_2V.shape[1] - 1)
        for i in range(row_2V.shape[1]):
            place = min(place, np.int32(i) if row_2V[0, i] == np.float32(1.0) else place)
        return place

    @inlined
    def sum_without(row_2V: Any, top: Any) -> Any:
        """The sum of all exponentials but one: a difference would lose it where the top has nearly all."""
        total = np.float32(0.0)
        for i in range(row_2V.shape[1]):
            total += np.float32(0.0) if i == top else row_2V[0, i]
        return max(total, np.float32(1e-37))

    @inlined
    def gradient(row_2V: Any, out_V: Any, share: Any, of_q: Any, of_p: Any, of_below: Any) -> None:
        """of_q * q - of_p * p - of_below * q [q < p]."""
        for i in range(len(out_V)):
            q, p = row_2V[0, i] * share, row_2V[1, i]
            below = q if q < p else np.float32(0.0)
            out_V[i] = narrow(of_q * q - of_p * p - of_below * below)

    @njit(cache=True, **FAST)
    def rows(
        logits: int,
        probs: int,
        row: int,
        best: int,
        inside: int,
        scales: int,
        stats: int,
        n: int,
        vocab: int,
        positions: int,
        cross_entropy: float,
        total_variation: float,
        trains_bonus: bool,
        fan_out: int,
    ) -> None:
        z_nV, p_PV = (
            carray(pointer(logits), (n, vocab), element),
            carray(pointer(probs), (positions, vocab), prob_element),
        )
        row_n, best_n = carray(pointer(row), (n,), np.int64), carray(pointer(best), (n,), np.int64)
        inside_n, scales_n2 = carray(pointer(inside), (n,), np.bool_), carray(pointer(scales), (n, 2), np.float32)
        stats_nC = carray(pointer(stats), (n, 7), np.float32)
        work_2V = np.empty((2, vocab), np.float32)
        one = np.float32(1.0)
        for i in range(n):
            target, z_V = best_n[i], z_nV[i]
            highest, mass, product, above = first_pass(z_V, p_PV[row_n[i]], work_2V, target)
            of_target = work_2V[0, target]
            total = exponentials(work_2V, highest)
            share, log_normaliser = one / total, highest + np.log(total)
            common, below = overlaps(work_2V, share)
            rank = above if inside_n[i] else np.float32(vocab)
            base, bonus = scales_n2[i, 0], scales_n2[i, 1]
            of_p, of_below = base * np.float32(cross_entropy), base * np.float32(total_variation)
            of_q, value, top = of_p * mass + of_below * below, np.float32(0.0), target
            counts = trains_bonus and inside_n[i] and rank > 0
            if counts:
                top = place_of_top(work_2V)
                rest = sum_without(work_2V, top)
                value = highest + np.log(rest) - of_target
                of_q += bonus * total / rest
            at_top = of_q - bonus * total / rest if counts else of_q
            q_top, p_top = work_2V[0, top] * share, work_2V[1, top]
            gradient(work_2V, z_V, share, of_q, of_p, of_below)
            if counts:
                q_t, p_t = work_2V[0, target] * share, work_2V[1, target]
                z_V[top] = narrow(
                    at_top * q_top - of_p * p_top - of_below * (q_top if q_top < p_top else np.float32(0.0))
                )
                z_V[target] = narrow(
                    of_q * q_t - of_p * p_t - of_below * (q_t if q_t < p_t else np.float32(0.0)) - bonus
                )
            stats_nC[i, 0] = mass * log_normaliser - product
            stats_nC[i, 1] = one - common
            stats_nC[i, 2] = rank == 0
            stats_nC[i, 3] = rank < fan_out
            stats_nC[i, 4] = rank >= 1 and rank <= fan_out
            stats_nC[i, 5] = max(one - mass, np.float32(0.0))
            stats_nC[i, 6] = value

    return rows


_LOGITS = {torch.bfloat16: (numba.uint16, widen_bf16, narrow_bf16), torch.float32: (numba.float32, same, same)}
_PROBS = {torch.float16: (numba.uint16, widen_fp16), torch.float32: (numba.float32, same)}
_PROBABILITIES = {dtype: _build_probabilities(element, widen) for dtype, (element, widen, _) in _LOGITS.items()}
_KERNELS = {(z, p): _build(*_LOGITS[z], *_PROBS[p]) for z in _LOGITS for p in _PROBS}
