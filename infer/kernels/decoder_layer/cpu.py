"""The small operations of a decoder layer for a few rows on CPU, compiled by numba: one call where torch takes ten.

Between two reads of the weights a layer at batch 1 is a stream of tiny operations, each of which costs tens of
microseconds there (the weights have just flushed the cache that held torch's code). The matrix products stay torch's.
Plain twins are at the top.

A row is computed by the same instructions whatever rows stand beside it: its result does not depend on them, bit for
bit. So a token verified among others leaves the keys that it would have left alone.

R rows, H row width, N query heads, M key/value heads, G = N / M, D head size, I width of the MLP, S slots of the pool.
bf16 or fp32; arithmetic in fp32, rounded once. Tensors are contiguous and on CPU; kernels take addresses, since a
numpy view of each would cost more than the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from infer.kernels.numba_scalars import FAST, exp, inlined, narrow_bf16, pointer, row_at, same, widen_bf16


class RowTable(NamedTuple):
    """Where the rows of a batch write their keys and which slots they see; int64 arrays."""

    write_R: np.ndarray
    slots: np.ndarray  # lists of slots behind each other
    start_R: np.ndarray  # where a row's list begins in `slots`
    count_R: np.ndarray  # and how long it is


def norm_reference(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Plain twin of `norm`."""
    return F.rms_norm(x.float(), weight_H.shape, weight_H.float(), eps).to(x.dtype)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Plain twin of `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def available(x: Tensor) -> bool:
    """Whether the kernels take this tensor's device and dtype."""
    return x.device.type == "cpu" and x.dtype in _KERNELS


def norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm of [..., H]."""
    if not available(x):
        return norm_reference(x, weight_H, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _KERNELS[x.dtype].norm(x.data_ptr(), weight_H.data_ptr(), out.data_ptr(), x.numel() // width, width, width, eps)
    return out


def pair_norm(x: Tensor, x_weight_H: Tensor, y: Tensor, y_weight_H: Tensor, eps: float) -> Tensor:
    """RMS norms of two tensors [..., H] beside each other, [..., 2H]."""
    if not available(x):
        return torch.cat([norm_reference(x, x_weight_H, eps), norm_reference(y, y_weight_H, eps)], dim=-1)
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    out, kernel = x.new_empty((*x.shape[:-1], 2 * width)), _KERNELS[x.dtype].norm
    rows, second = x.numel() // width, out.data_ptr() + width * out.element_size()
    kernel(x.data_ptr(), x_weight_H.data_ptr(), out.data_ptr(), rows, width, 2 * width, eps)
    kernel(y.data_ptr(), y_weight_H.data_ptr(), second, rows, width, 2 * width, eps)
    return out


def add_norm(x: Tensor, y: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` rounded to the dtype, and the RMS norm of that; both [..., H]."""
    if not available(x):
        return x + y, norm_reference(x + y, weight_H, eps)
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    addresses = (x.data_ptr(), y.data_ptr(), weight_H.data_ptr(), total.data_ptr(), out.data_ptr())
    _KERNELS[x.dtype].add_norm(*addresses, x.numel() // width, width, eps)
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: silu of the first half times the second."""
    if not available(gate_up):
        return silu_mul_reference(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _KERNELS[gate_up.dtype].silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def attend(
    qkv_RX: Tensor, turn: tuple[Tensor, Tensor], pool: tuple[Tensor, Tensor], table: RowTable, scale: float
) -> Tensor:
    """Rotate, write the rows' keys and values to the pool, attend: [R, (N + 2M) D] -> [R, N D].

    `turn`: cosines and sines, fp32 [R, D], the second half of D as the first. `pool`: keys and values [S, M, D] of the
    layer.
    """
    keys, values = pool
    rows, heads, size = len(table.write_R), keys.shape[1], keys.shape[2]
    queries = qkv_RX.shape[-1] // size - 2 * heads
    out = qkv_RX.new_empty((*qkv_RX.shape[:-1], queries * size))
    addresses = [t.data_ptr() for t in (qkv_RX, *turn, keys, values, out)]
    _KERNELS[qkv_RX.dtype].attend(*addresses, *table, rows, queries, heads, size, keys.shape[0], scale)
    return out


def compile_now(like: Tensor) -> None:
    """Compile what rows of this dtype need, where it is not on disk yet: seconds that must not fall into an answer."""
    if not available(like):
        return
    x, one = like.new_zeros(1, 2), np.zeros(1, np.int64)
    pair_norm(x, x[0], x, x[0], 1.0)
    add_norm(x, x, x[0], 1.0)
    silu_mul(x)
    turn = (torch.zeros(1, 2), torch.zeros(1, 2))
    attend(
        like.new_zeros(1, 6),
        turn,
        (like.new_zeros(1, 1, 2), like.new_zeros(1, 1, 2)),
        RowTable(one, one, one, one + 1),
        1.0,
    )


class _Kernels(NamedTuple):
    norm: Any
    add_norm: Any
    silu_mul: Any
    attend: Any


def _build(element: Any, bytes_each: int, widen: Any, narrow: Any) -> _Kernels:
    @inlined
    def scale_row(x_H: Any, weight_H: Any, out_H: Any, eps: Any) -> None:
        total = np.float32(0.0)
        for i in range(len(x_H)):
            value = widen(x_H[i])
            total += value * value
        factor = np.float32(1.0) / np.sqrt(total / np.float32(len(x_H)) + np.float32(eps))
        for i in range(len(x_H)):
            out_H[i] = narrow(widen(x_H[i]) * factor * widen(weight_H[i]))

    @njit(cache=True, **FAST)
    def norm(x: int, weight: int, out: int, rows: int, width: int, out_stride: int, eps: float) -> None:
        x_RH, weight_H = carray(pointer(x), (rows, width), element), carray(pointer(weight), (width,), element)
        out_RX = carray(pointer(out), ((rows - 1) * out_stride + width,), element)
        for r in range(rows):
            scale_row(x_RH[r], weight_H, out_RX[r * out_stride : r * out_stride + width], eps)

    @njit(cache=True, **FAST)
    def add_norm(x: int, y: int, weight: int, total: int, out: int, rows: int, width: int, eps: float) -> None:
        shape = (rows, width)
        x_RH, y_RH = carray(pointer(x), shape, element), carray(pointer(y), shape, element)
        total_RH, out_RH = carray(pointer(total), shape, element), carray(pointer(out), shape, element)
        weight_H = carray(pointer(weight), (width,), element)
        for r in range(rows):
            for i in range(width):
                total_RH[r, i] = narrow(widen(x_RH[r, i]) + widen(y_RH[r, i]))
            scale_row(total_RH[r], weight_H, out_RH[r], eps)

    @njit(cache=True, **FAST)
    def silu_mul(gate_up: int, out: int, rows: int, width: int) -> None:
        both = carray(pointer(gate_up), (rows, 2, width), element)
        out_RI = carray(pointer(out), (rows, width), element)
        for r in range(rows):
            for i in range(width):
                gate = widen(both[r, 0, i])
                out_RI[r, i] = narrow(gate / (np.float32(1.0) + exp(-gate)) * widen(both[r, 1, i]))

    @inlined
    def turn_head(x_D: Any, cos_D: Any, sin_D: Any, out_D: Any) -> None:
        half = len(x_D) // 2
        for d in range(half):
            low, high = widen(x_D[d]), widen(x_D[half + d])
            out_D[d] = low * cos_D[d] - high * sin_D[d]
            out_D[half + d] = high * cos_D[half + d] + low * sin_D[half + d]

    @inlined
    def score_keys(query_D: Any, keys: int, starts_L: Any, scores_L: Any) -> None:
        """Four keys at a time: the query is read once for them, and their sums do not wait for each other."""
        count, size = len(starts_L), len(query_D)
        for i in range(0, count - 3, 4):
            a_D, b_D = row_at(keys + starts_L[i], size, element), row_at(keys + starts_L[i + 1], size, element)
            c_D, d_D = row_at(keys + starts_L[i + 2], size, element), row_at(keys + starts_L[i + 3], size, element)
            a = b = c = d = np.float32(0.0)
            for j in range(size):
                q = query_D[j]
                a += q * widen(a_D[j])
                b += q * widen(b_D[j])
                c += q * widen(c_D[j])
                d += q * widen(d_D[j])
            scores_L[i], scores_L[i + 1], scores_L[i + 2], scores_L[i + 3] = a, b, c, d
        for i in range(count // 4 * 4, count):
            a_D, a = row_at(keys + starts_L[i], size, element), np.float32(0.0)
            for j in range(size):
                a += query_D[j] * widen(a_D[j])
            scores_L[i] = a

    @inlined
    def soften(scores_L: Any, scale: Any) -> None:
        """Softmax of the scaled scores, in place."""
        highest = np.float32(-np.inf)
        for i in range(len(scores_L)):
            highest = max(highest, scores_L[i])
        total = np.float32(0.0)
        for i in range(len(scores_L)):
            scores_L[i] = exp((scores_L[i] - highest) * scale)
            total += scores_L[i]
        for i in range(len(scores_L)):
            scores_L[i] /= total

    @inlined
    def mix_values(weights_L: Any, values: int, starts_L: Any, mixed_D: Any) -> None:
        count, size = len(starts_L), len(mixed_D)
        mixed_D[:] = np.float32(0.0)
        for i in range(0, count - 3, 4):
            a_D, b_D = row_at(values + starts_L[i], size, element), row_at(values + starts_L[i + 1], size, element)
            c_D, d_D = row_at(values + starts_L[i + 2], size, element), row_at(values + starts_L[i + 3], size, element)
            a, b, c, d = weights_L[i], weights_L[i + 1], weights_L[i + 2], weights_L[i + 3]
            for j in range(size):
                mixed_D[j] += (a * widen(a_D[j]) + b * widen(b_D[j])) + (c * widen(c_D[j]) + d * widen(d_D[j]))
        for i in range(count // 4 * 4, count):
            a_D, a = row_at(values + starts_L[i], size, element), weights_L[i]
            for j in range(size):
                mixed_D[j] += a * widen(a_D[j])

    @njit(cache=True, **FAST)
    def attend(
        qkv: int,
        cos: int,
        sin: int,
        keys: int,
        values: int,
        out: int,
        write_R: Any,
        slots: Any,
        start_R: Any,
        count_R: Any,
        rows: int,
        queries: int,
        heads: int,
        size: int,
        pool: int,
        scale: float,
    ) -> None:
        qkv_RXD = carray(pointer(qkv), (rows, queries + 2 * heads, size), element)
        cos_RD, sin_RD = carray(pointer(cos), (rows, size), np.float32), carray(pointer(sin), (rows, size), np.float32)
        all_keys = carray(pointer(keys), (pool * heads * size,), element)
        all_values = carray(pointer(values), (pool * heads * size,), element)
        out_RND = carray(pointer(out), (rows, queries, size), element)
        turned_D, mixed_D = np.empty(size, np.float32), np.empty(size, np.float32)
        for r in range(rows):
            for m in range(heads):
                turn_head(qkv_RXD[r, queries + m], cos_RD[r], sin_RD[r], turned_D)
                start = (write_R[r] * heads + m) * size
                for d in range(size):
                    all_keys[start + d] = narrow(turned_D[d])
                    all_values[start + d] = qkv_RXD[r, queries + heads + m, d]
        for r in range(rows):
            starts_L = slots[start_R[r] : start_R[r] + count_R[r]] * (heads * size * bytes_each)
            scores_L = np.empty(count_R[r], np.float32)
            for n in range(queries):
                m = n * heads // queries
                turn_head(qkv_RXD[r, n], cos_RD[r], sin_RD[r], turned_D)
                score_keys(turned_D, keys + m * size * bytes_each, starts_L, scores_L)
                soften(scores_L, np.float32(scale))
                mix_values(scores_L, values + m * size * bytes_each, starts_L, mixed_D)
                for d in range(size):
                    out_RND[r, n, d] = narrow(mixed_D[d])

    return _Kernels(norm, add_norm, silu_mul, attend)


_KERNELS = {
    torch.bfloat16: _build(numba.uint16, 2, widen_bf16, narrow_bf16),
    torch.float32: _build(numba.float32, 4, same, same),
}
