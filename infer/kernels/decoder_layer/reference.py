"""The small operations of a Llama decoder layer in plain torch: RMS norm, gated activation, rotary embedding.

The truth that the compiled kernels are tested against, here and in `train.ops.layer`, and what the drafter's model
file is written with. Arithmetic in fp32, rounded once to the input's dtype.

B batch, S rows, H row width, I width of the MLP, N heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: [..., H] -> [..., H], in the dtype of x."""
    return F.rms_norm(x.float(), weight_H.shape, weight_H.float(), eps).to(x.dtype)


def pair_norm(x: Tensor, x_weight_H: Tensor, y: Tensor, y_weight_H: Tensor, eps: float) -> Tensor:
    """RMS norms of two tensors [..., H] beside each other, [..., 2H]: the input of the drafter's first layer."""
    return torch.cat([rms_norm(x, x_weight_H, eps), rms_norm(y, y_weight_H, eps)], dim=-1)


def add_norm(x: Tensor, y: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` rounded to the dtype, and the RMS norm of that; both [..., H]."""
    total = x + y
    return total, rms_norm(total, weight_H, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second: [..., 2I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotary embedding by half-rotation, as transformers' Llama does it: x * cos + [-second half, first half] * sin.

    One roll and signed sines instead of two slices and a cat. The tables' second half equals their first.
    """
    half = x_BSND.shape[-1] // 2
    signed = torch.cat([-sin_BSD[..., :half], sin_BSD[..., half:]], dim=-1)[:, :, None]
    return torch.addcmul(x_BSND * cos_BSD[:, :, None], x_BSND.roll(half, -1), signed).to(x_BSND.dtype)
