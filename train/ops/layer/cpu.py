"""RMS norm, gated activation and rotation with their gradients on CPU, compiled by numba: one pass over memory each,
where autograd takes ten.

A training step of a small drafter spends more time in these than in its matrix products. bf16 or fp32 in and out,
arithmetic in fp32; `available` says what the kernels take.

R rows, H row width, N heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from infer.kernels.numba_scalars import FAST, exp, narrow_bf16, pointer, same, widen_bf16


def available(x: Tensor) -> bool:
    """Whether the kernels take this tensor's device and dtype."""
    return x.device.type == "cpu" and x.dtype in _KERNELS


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x. `weight` is fp32."""
    return _RmsNorm.apply(x, weight_H, eps)  # type: ignore[no-any-return]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once."""
    return _SiluMul.apply(gate, up)  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of [..., N, D] by fp32 tables [..., D] whose halves are equal; the leading sizes are the same."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        rows, out = x.numel() // x.shape[-1], torch.empty_like(x)
        factor_R = torch.empty(rows, dtype=torch.float32)
        _KERNELS[x.dtype].norm(*_addresses(x, weight, out, factor_R), rows, x.shape[-1], eps)
        ctx.save_for_backward(x, weight, factor_R)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, factor_R = ctx.saved_tensors
        grad, grad_x, grad_weight = grads[0].contiguous(), torch.empty_like(x), torch.zeros_like(weight)
        _KERNELS[x.dtype].norm_back(
            *_addresses(grad, x, weight, factor_R, grad_x, grad_weight), len(factor_R), x.shape[-1]
        )
        return grad_x, grad_weight, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _KERNELS[gate.dtype].silu_mul(*_addresses(gate, up, out), gate.numel())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad, grad_gate, grad_up = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        _KERNELS[gate.dtype].silu_mul_back(*_addresses(grad, gate, up, grad_gate, grad_up), gate.numel())
        return grad_gate, grad_up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out, heads, size = torch.empty_like(x), x.shape[-2], x.shape[-1]
    rows = x.numel() // (heads * size)
    assert cos.numel() == rows * size, (x.shape, cos.shape)
    _KERNELS[x.dtype].rotate(*_addresses(x, cos, sin, out), rows, heads, size, sign)
    return out


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class _Kernels(NamedTuple):
    norm: Any
    norm_back: Any
    silu_mul: Any
    silu_mul_back: Any
    rotate: Any


def _build(element: Any, widen: Any, narrow: Any) -> _Kernels:
    single: Any = numba.float32

    @njit(cache=True, **FAST)
    def norm(x: int, weight: int, out: int, factor: int, rows: int, width: int, eps: float) -> None:
        x_RH, out_RH = carray(pointer(x), (rows, width), element), carray(pointer(out), (rows, width), element)
        weight_H, factor_R = carray(pointer(weight), (width,), single), carray(pointer(factor), (rows,), single)
        for r in range(rows):
            total = np.float32(0.0)
            for i in range(width):
                value = widen(x_RH[r, i])
                total += value * value
            by = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))
            factor_R[r] = by
            for i in range(width):
                out_RH[r, i] = narrow(widen(x_RH[r, i]) * by * weight_H[i])

    @njit(cache=True, **FAST)
    def norm_back(
        grad: int, x: int, weight: int, factor: int, grad_x: int, grad_weight: int, rows: int, width: int
    ) -> None:
        """With s = factor, h = x s: d/dx = s (g w - h mean(g w h)), d/dw = sum of g h over the rows."""
        shape = (rows, width)
        g_RH, x_RH, gx_RH = (
            carray(pointer(grad), shape, element),
            carray(pointer(x), shape, element),
            carray(pointer(grad_x), shape, element),
        )
        w_H, gw_H = carray(pointer(weight), (width,), single), carray(pointer(grad_weight), (width,), single)
        factor_R = carray(pointer(factor), (rows,), single)
        for r in range(rows):
            by, total = factor_R[r], np.float32(0.0)
            for i in range(width):
                g_h = widen(g_RH[r, i]) * widen(x_RH[r, i]) * by
                gw_H[i] += g_h
                total += g_h * w_H[i]
            mean = total / np.float32(width)
            for i in range(width):
                gx_RH[r, i] = narrow(by * (widen(g_RH[r, i]) * w_H[i] - widen(x_RH[r, i]) * by * mean))

    @njit(cache=True, **FAST)
    def silu_mul(gate: int, up: int, out: int, count: int) -> None:
        gates, ups, outs = (
            carray(pointer(gate), (count,), element),
            carray(pointer(up), (count,), element),
            carray(pointer(out), (count,), element),
        )
        for i in range(count):
            value = widen(gates[i])
            outs[i] = narrow(value / (np.float32(1.0) + exp(-value)) * widen(ups[i]))

    @njit(cache=True, **FAST)
    def silu_mul_back(grad: int, gate: int, up: int, grad_gate: int, grad_up: int, count: int) -> None:
        grads, gates, ups = (
            carray(pointer(grad), (count,), element),
            carray(pointer(gate), (count,), element),
            carray(pointer(up), (count,), element),
        )
        grad_gates, grad_ups = (
            carray(pointer(grad_gate), (count,), element),
            carray(pointer(grad_up), (count,), element),
        )
        one = np.float32(1.0)
        for i in range(count):
            value, g = widen(gates[i]), widen(grads[i])
            share = one / (one + exp(-value))
            grad_gates[i] = narrow(g * widen(ups[i]) * share * (one + value * (one - share)))
            grad_ups[i] = narrow(g * value * share)

    @njit(cache=True, **FAST)
    def rotate(x: int, cos: int, sin: int, out: int, rows: int, heads: int, size: int, sign: float) -> None:
        shape, half = (rows, heads, size), size // 2
        x_RND, out_RND = carray(pointer(x), shape, element), carray(pointer(out), shape, element)
        cos_RD, sin_RD = carray(pointer(cos), (rows, size), single), carray(pointer(sin), (rows, size), single)
        for r in range(rows):
            for n in range(heads):
                for d in range(half):
                    low, high = widen(x_RND[r, n, d]), widen(x_RND[r, n, half + d])
                    c, s = cos_RD[r, d], sin_RD[r, d] * np.float32(sign)
                    out_RND[r, n, d] = narrow(low * c - high * s)
                    out_RND[r, n, half + d] = narrow(high * c + low * s)

    return _Kernels(norm, norm_back, silu_mul, silu_mul_back, rotate)


_KERNELS = {
    torch.bfloat16: _build(numba.uint16, widen_bf16, narrow_bf16),
    torch.float32: _build(numba.float32, same, same),
}
