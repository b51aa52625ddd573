"""The small operations of a Llama decoder layer, each by the fastest implementation that takes its tensors: compiled
rows on a CPU (`cpu`), else plain torch (`reference`).

H row width, I width of the MLP. Inference only: no gradients (`train.ops.layer` has them).
"""

from __future__ import annotations

from torch import Tensor

from infer.kernels.decoder_layer import cpu, reference


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, [..., H] -> [..., H]."""
    return (cpu if cpu.available(x) else reference).rms_norm(x, weight_H, eps)


def pair_norm(x: Tensor, x_weight_H: Tensor, y: Tensor, y_weight_H: Tensor, eps: float) -> Tensor:
    """RMS norms of two tensors [..., H] beside each other, [..., 2H]."""
    return (cpu if cpu.available(x) else reference).pair_norm(x, x_weight_H, y, y_weight_H, eps)


def add_norm(x: Tensor, y: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` rounded to the dtype, and the RMS norm of that; both [..., H]."""
    return (cpu if cpu.available(x) else reference).add_norm(x, y, weight_H, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second: [..., 2I] -> [..., I]."""
    return (cpu if cpu.available(gate_up) else reference).silu_mul(gate_up)
