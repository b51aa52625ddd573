"""The small operations of a decoder layer for rows on CPU, compiled by numba: one call where torch takes ten.

Between two reads of the weights a layer at batch 1 is a stream of tiny operations, each of which costs torch tens of
microseconds (the weights have just flushed the cache that held torch's code). The matrix products stay torch's. A row
is computed by the same instructions whatever rows stand beside it, so its result does not depend on them, bit for bit.

R rows, H row width, I width of the MLP. bf16 or fp32; arithmetic in fp32, rounded once. Kernels take addresses, since
a numpy view of each tensor would cost more than the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from infer.kernels.numba_scalars import FAST, exp, inlined, narrow_bf16, pointer, same, widen_bf16


def available(x: Tensor) -> bool:
    """Whether the kernels take this tensor's device and dtype."""
    return x.device.type == "cpu" and x.dtype in _KERNELS


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm of [..., H]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _KERNELS[x.dtype].norm(x.data_ptr(), weight_H.data_ptr(), out.data_ptr(), x.numel() // width, width, width, eps)
    return out


def pair_norm(x: Tensor, x_weight_H: Tensor, y: Tensor, y_weight_H: Tensor, eps: float) -> Tensor:
    """RMS norms of two tensors [..., H] beside each other, [..., 2H]."""
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    out, kernel = x.new_empty((*x.shape[:-1], 2 * width)), _KERNELS[x.dtype].norm
    rows, second = x.numel() // width, out.data_ptr() + width * out.element_size()
    kernel(x.data_ptr(), x_weight_H.data_ptr(), out.data_ptr(), rows, width, 2 * width, eps)
    kernel(y.data_ptr(), y_weight_H.data_ptr(), second, rows, width, 2 * width, eps)
    return out


def add_norm(x: Tensor, y: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` rounded to the dtype, and the RMS norm of that; both [..., H]."""
    x, y, width = x.contiguous(), y.contiguous(), x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    addresses = (x.data_ptr(), y.data_ptr(), weight_H.data_ptr(), total.data_ptr(), out.data_ptr())
    _KERNELS[x.dtype].add_norm(*addresses, x.numel() // width, width, eps)
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2I] -> [..., I]: silu of the first half times the second."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _KERNELS[gate_up.dtype].silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def compile_now(like: Tensor) -> None:
    """Compile the kernels for this dtype, unless they are on disk: seconds that must not fall into an answer."""
    if not available(like):
        return
    x = like.new_zeros(1, 2)
    pair_norm(x, x[0], x, x[0], 1.0)
    add_norm(x, x, x[0], 1.0)
    silu_mul(x)


class _Kernels(NamedTuple):
    norm: Any
    add_norm: Any
    silu_mul: Any


def _build(element: Any, widen: Any, narrow: Any) -> _Kernels:
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

    return _Kernels(norm, add_norm, silu_mul)


_KERNELS = {
    torch.bfloat16: _build(numba.uint16, widen_bf16, narrow_bf16),
    torch.float32: _build(numba.float32, same, same),
}
