"""RMS norm, gated activation and rotation with gradients, each by the fastest implementation that takes its tensors:
compiled rows on a CPU (`cpu`), else plain torch (`reference`).

B batch, S slots, H row width, N heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train.ops.layer import cpu, reference


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x."""
    compiled = cpu.available(x) and weight_H.dtype == torch.float32
    return (cpu if compiled else reference).rms_norm(x, weight_H, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (cpu if cpu.available(gate) else reference).silu_mul(gate, up)


def rotate(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Half-rotation by position: fp32 tables whose second half of D equals the first."""
    compiled = cpu.available(x_BSND) and x_BSND.shape[:2] == cos_BSD.shape[:2]
    return (cpu if compiled else reference).rotate(x_BSND, cos_BSD, sin_BSD)
