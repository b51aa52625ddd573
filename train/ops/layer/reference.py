"""RMS norm, gated activation and rotation in plain torch, with autograd's gradients: what the drafter's model file
computes.

B batch, S slots, H row width, N heads, D head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from infer.kernels.decoder_layer import reference


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x."""
    return reference.rms_norm(x, weight_H, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def rotate(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Half-rotation by position."""
    return reference.rotate(x_BSND, cos_BSD, sin_BSD)
