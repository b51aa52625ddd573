"""The softmax between two matrix products of attention, with its gradient, compiled for CPUs by numba: only the slots
that a query sees are touched.

A query sees a run of slots, whose scores against it a product has left in a row of `far`, and a few keys of its own,
which are read here. `reference` has the same two functions in plain torch. Shapes: B rows, M key-value heads,
R = G A Q queries of a head (G heads that share it, A anchors, Q queries of an anchor), D head dimension, T slots, I
own keys of an anchor. bf16 or fp32, arithmetic in fp32. Both kernels open the same addresses with the same lines: a
numba function that returned the views would cost more than it saves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from infer.kernels.numba_scalars import (
    FAST,
    LOWEST,
    called,
    exp,
    from_order,
    narrow_bf16,
    pointer,
    row_at,
    same,
    to_order,
    widen_bf16,
)
from train.ops.attention.span import Span


def available(x: Tensor) -> bool:
    """Whether the kernels take this tensor's device and dtype."""
    return x.device.type == "cpu" and x.dtype in _KERNELS


def softmax(
    q_BMRD: Tensor,
    far_BMRT: Tensor,
    own_k_BAIMD: Tensor,
    own_v_BAIMD: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor]:
    """Scores `far` become weights in place, zero where nothing is seen. Returns what the own keys add to the output
    [B, M, R, D], and the logarithms of the sums, fp32 [B, M, R].
    """
    near = torch.empty_like(q_BMRD)
    normaliser = torch.empty(q_BMRD.shape[:3], dtype=torch.float32)
    seen = _seen(span.own, own_k_BAIMD)
    tensors = (q_BMRD, far_BMRT, own_k_BAIMD, own_v_BAIMD, span.start, span.stop, seen, near, normaliser)
    _KERNELS[q_BMRD.dtype].softmax(*_addresses(*tensors), *_sizes(q_BMRD, far_BMRT, seen))
    return near, normaliser


def softmax_gradient(
    rows: tuple[Tensor, Tensor, Tensor],
    far_BMRT: Tensor,
    far_grad_BMRT: Tensor,
    own_k_BAIMD: Tensor,
    own_v_BAIMD: Tensor,
    normaliser_BMR: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores `far` become weights and `far_grad`, the gradients of the weights, gradients of the scores, both in
    place.

    `rows` are q, the output's gradient and the output, [B, M, R, D] each. Returns the own keys' part of q's gradient
    [B, M, R, D], and the gradients of own keys and values, fp32 [B, A, I, M, D].
    """
    q_BMRD, grad_BMRD, output_BMRD = rows
    to_q = torch.empty_like(q_BMRD)
    to_k, to_v = (torch.zeros(own_k_BAIMD.shape, dtype=torch.float32) for _ in range(2))
    seen = _seen(span.own, own_k_BAIMD)
    tensors = (q_BMRD, grad_BMRD, output_BMRD, far_BMRT, far_grad_BMRT, own_k_BAIMD, own_v_BAIMD, normaliser_BMR)
    tensors += (span.start, span.stop, seen, to_q, to_k, to_v)
    _KERNELS[q_BMRD.dtype].gradient(*_addresses(*tensors), *_sizes(q_BMRD, far_BMRT, seen))
    return to_q, to_k, to_v


def _seen(own_BAQI: Tensor | None, own_k_BAIMD: Tensor) -> Tensor:
    batch, anchors, own = own_k_BAIMD.shape[:3]
    if own_BAQI is None:
        return torch.ones(batch, anchors, 1, own, dtype=torch.bool)
    return own_BAQI.expand(batch, anchors, -1, -1).contiguous()


def _addresses(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors), [(tensor.shape, tensor.stride()) for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors]


def _sizes(q_BMRD: Tensor, far_BMRT: Tensor, seen_BAQI: Tensor) -> list[int]:
    batch, groups, rows, dim = q_BMRD.shape
    _, anchors, queries, own = seen_BAQI.shape
    assert rows % (anchors * queries) == 0, (q_BMRD.shape, seen_BAQI.shape)
    return [batch, groups, rows // (anchors * queries), anchors, queries, dim, far_BMRT.shape[-1], own]


class _Kernels(NamedTuple):
    softmax: Any
    gradient: Any


def _build(element: Any, bytes_each: int, widen: Any, narrow: Any) -> _Kernels:
    @called
    def at(address: int, place: int, size: int) -> Any:
        return row_at(address + place * bytes_each, size, element)

    @called
    def floats(address: int, place: int, size: int) -> Any:
        return row_at(address + place * 4, size, np.float32)

    @called
    def power(x: Any) -> Any:
        return exp(x)

    @called
    def dot(a_D: Any, b_D: Any) -> Any:
        total = np.float32(0.0)
        for d in range(len(a_D)):
            total += widen(a_D[d]) * widen(b_D[d])
        return total

    @called
    def add_scaled(out_D: Any, by: Any, x_D: Any) -> None:
        for d in range(len(out_D)):
            out_D[d] += by * widen(x_D[d])

    @called
    def highest_of(row_S: Any) -> Any:
        highest = LOWEST
        for s in range(len(row_S)):
            highest = max(highest, to_order(widen(row_S[s])))
        return from_order(highest)

    @called
    def sum_of_exponentials(row_S: Any, highest: Any) -> Any:
        total = np.float32(0.0)
        for s in range(len(row_S)):
            total += exp(widen(row_S[s]) - highest)
        return total

    @called
    def to_weights(row_S: Any, normaliser: Any) -> None:
        for s in range(len(row_S)):
            row_S[s] = narrow(exp(widen(row_S[s]) - normaliser))

    @called
    def to_gradients(row_S: Any, grad_S: Any, normaliser: Any, along: Any) -> None:
        for s in range(len(row_S)):
            weight = exp(widen(row_S[s]) - normaliser)
            row_S[s] = narrow(weight)
            grad_S[s] = narrow(weight * (widen(grad_S[s]) - along))

    @njit(cache=True, **FAST)
    def softmax(
        q: int,
        far: int,
        own_k: int,
        own_v: int,
        start: int,
        stop: int,
        seen: int,
        near: int,
        normaliser: int,
        batch: int,
        groups: int,
        shared: int,
        anchors: int,
        queries: int,
        dim: int,
        slots: int,
        own: int,
    ) -> None:
        start_BA, stop_BA = (
            carray(pointer(start), (batch, anchors), np.int64),
            carray(pointer(stop), (batch, anchors), np.int64),
        )
        seen_BAQI = carray(pointer(seen), (batch, anchors, queries, own), np.bool_)
        normaliser_R = carray(pointer(normaliser), (batch * groups * shared * anchors * queries,), np.float32)
        scores_I, mixed_D = np.empty(own, np.float32), np.empty(dim, np.float32)
        rows = shared * anchors * queries
        for b in range(batch):
            for m in range(groups):
                for r in range(rows):
                    a, j = r // queries % anchors, r % queries
                    row = (b * groups + m) * rows + r
                    first, last = start_BA[b, a], stop_BA[b, a]
                    q_D, keys = at(q, row * dim, dim), ((b * anchors + a) * own * groups + m) * dim
                    highest = highest_of(at(far, row * slots + first, last - first))
                    for i in range(own):
                        score = (
                            dot(q_D, at(own_k, keys + i * groups * dim, dim))
                            if seen_BAQI[b, a, j, i]
                            else np.float32(-np.inf)
                        )
                        scores_I[i] = score
                        highest = max(highest, score)
                    total = sum_of_exponentials(at(far, row * slots + first, last - first), highest)
                    for i in range(own):
                        if seen_BAQI[b, a, j, i]:
                            total += power(scores_I[i] - highest)
                    log_sum = highest + np.log(total)
                    normaliser_R[row] = log_sum
                    at(far, row * slots, first)[:] = element(0)
                    to_weights(at(far, row * slots + first, last - first), log_sum)
                    at(far, row * slots + last, slots - last)[:] = element(0)
                    mixed_D[:] = np.float32(0.0)
                    for i in range(own):
                        if seen_BAQI[b, a, j, i]:
                            add_scaled(mixed_D, power(scores_I[i] - log_sum), at(own_v, keys + i * groups * dim, dim))
                    out_D = at(near, row * dim, dim)
                    for d in range(dim):
                        out_D[d] = narrow(mixed_D[d])

    @njit(cache=True, **FAST)
    def gradient(
        q: int,
        grad: int,
        output: int,
        far: int,
        far_grad: int,
        own_k: int,
        own_v: int,
        normaliser: int,
        start: int,
        stop: int,
        seen: int,
        to_q: int,
        to_k: int,
        to_v: int,
        batch: int,
        groups: int,
        shared: int,
        anchors: int,
        queries: int,
        dim: int,
        slots: int,
        own: int,
    ) -> None:
        start_BA, stop_BA = (
            carray(pointer(start), (batch, anchors), np.int64),
            carray(pointer(stop), (batch, anchors), np.int64),
        )
        seen_BAQI = carray(pointer(seen), (batch, anchors, queries, own), np.bool_)
        normaliser_R = carray(pointer(normaliser), (batch * groups * shared * anchors * queries,), np.float32)
        mixed_D, rows = np.empty(dim, np.float32), shared * anchors * queries
        for b in range(batch):
            for m in range(groups):
                for r in range(rows):
                    a, j = r // queries % anchors, r % queries
                    row = (b * groups + m) * rows + r
                    first, last, log_sum = start_BA[b, a], stop_BA[b, a], normaliser_R[row]
                    q_D, grad_D, keys = (
                        at(q, row * dim, dim),
                        at(grad, row * dim, dim),
                        ((b * anchors + a) * own * groups + m) * dim,
                    )
                    along = dot(grad_D, at(output, row * dim, dim))
                    at(far, row * slots, first)[:] = element(0)
                    at(far_grad, row * slots, first)[:] = element(0)
                    here = row * slots + first
                    to_gradients(at(far, here, last - first), at(far_grad, here, last - first), log_sum, along)
                    at(far, row * slots + last, slots - last)[:] = element(0)
                    at(far_grad, row * slots + last, slots - last)[:] = element(0)
                    mixed_D[:] = np.float32(0.0)
                    for i in range(own):
                        if seen_BAQI[b, a, j, i]:
                            place = keys + i * groups * dim
                            weight = power(dot(q_D, at(own_k, place, dim)) - log_sum)
                            by = weight * (dot(grad_D, at(own_v, place, dim)) - along)
                            add_scaled(mixed_D, by, at(own_k, place, dim))
                            add_scaled(floats(to_k, place, dim), by, q_D)
                            add_scaled(floats(to_v, place, dim), weight, grad_D)
                    out_D = at(to_q, row * dim, dim)
                    for d in range(dim):
                        out_D[d] = narrow(mixed_D[d])

    return _Kernels(softmax, gradient)


_KERNELS = {
    torch.bfloat16: _build(numba.uint16, 2, widen_bf16, narrow_bf16),
    torch.float32: _build(numba.float32, 4, same, same),
}
