"""Paged attention of a few rows on CPU, compiled by numba: rotation, writing of the new keys, and attention in one
call.

At batch 1 a layer is a stream of tiny operations between two reads of the weights, each of which costs torch tens of
microseconds. A row is computed by the same instructions whatever rows stand beside it, so its result does not depend
on them, bit for bit: a token verified among others leaves the keys that it would have left alone.

R rows, N query heads, M key/value heads, G = N / M, D head size, L keys of one row, S slots of the pool. bf16 or fp32;
arithmetic in fp32, rounded once. Tensors are contiguous; kernels take addresses, since a numpy view of each tensor
would cost more than the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from infer.kernels.numba_scalars import FAST, exp, inlined, narrow_bf16, pointer, row_at, same, widen_bf16


class RowTable(NamedTuple):
    """Where the rows of a batch write their keys and which slots they see; int64 arrays."""

    write_R: np.ndarray
    slots: np.ndarray  # the rows' lists of visible slots, one after the other
    start_R: np.ndarray  # where a row's list begins in `slots`
    count_R: np.ndarray  # and how long it is


def available(x: Tensor) -> bool:
    """Whether the kernel takes this tensor's device and dtype."""
    return x.device.type == "cpu" and x.dtype in _KERNELS


def attend(
    qkv_RX: Tensor, cos_sin: tuple[Tensor, Tensor], pool: tuple[Tensor, Tensor], table: RowTable, scale: float
) -> Tensor:
    """Rotate, write the rows' keys and values to the pool, attend: [R, (N + 2M) D] -> [R, N D].

    `cos_sin`: fp32 [R, D] each, the second half of D as the first. `pool`: keys and values [S, M, D] of the layer.
    """
    keys, values = pool
    rows, heads, size = len(table.write_R), keys.shape[1], keys.shape[2]
    queries = qkv_RX.shape[-1] // size - 2 * heads
    out = qkv_RX.new_empty((*qkv_RX.shape[:-1], queries * size))
    addresses = [t.data_ptr() for t in (qkv_RX, *cos_sin, keys, values, out)]
    _KERNELS[qkv_RX.dtype](*addresses, *table, rows, queries, heads, size, keys.shape[0], scale)
    return out


def compile_now(like: Tensor) -> None:
    """Compile the kernel for this dtype, unless it is on disk: seconds that must not fall into an answer."""
    if not available(like):
        return
    one, tables, side = np.zeros(1, np.int64), (torch.zeros(1, 2), torch.zeros(1, 2)), like.new_zeros(1, 1, 2)
    attend(like.new_zeros(1, 6), tables, (side, side.clone()), RowTable(one, one, one, one + 1), 1.0)


def _build(element: Any, bytes_each: int, widen: Any, narrow: Any) -> Any:
    @inlined
    def rotate_head(x_D: Any, cos_D: Any, sin_D: Any, out_D: Any) -> None:
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
        rotated_D, mixed_D = np.empty(size, np.float32), np.empty(size, np.float32)
        for r in range(rows):
            for m in range(heads):
                rotate_head(qkv_RXD[r, queries + m], cos_RD[r], sin_RD[r], rotated_D)
                start = (write_R[r] * heads + m) * size
                for d in range(size):
                    all_keys[start + d] = narrow(rotated_D[d])
                    all_values[start + d] = qkv_RXD[r, queries + heads + m, d]
        for r in range(rows):
            starts_L = slots[start_R[r] : start_R[r] + count_R[r]] * (heads * size * bytes_each)
            scores_L = np.empty(count_R[r], np.float32)
            for n in range(queries):
                m = n * heads // queries
                rotate_head(qkv_RXD[r, n], cos_RD[r], sin_RD[r], rotated_D)
                score_keys(rotated_D, keys + m * size * bytes_each, starts_L, scores_L)
                soften(scores_L, np.float32(scale))
                mix_values(scores_L, values + m * size * bytes_each, starts_L, mixed_D)
                for d in range(size):
                    out_RND[r, n, d] = narrow(mixed_D[d])

    return attend


_KERNELS = {
    torch.bfloat16: _build(numba.uint16, 2, widen_bf16, narrow_bf16),
    torch.float32: _build(numba.float32, 4, same, same),
}
