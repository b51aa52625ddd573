"""Compiled layers for the drafter in training: norms, gated activations and rotations by `train.ops.layer`.

The model file stays plain torch; this is applied from outside, by `Objective`. A module changes its class and nothing
else, so parameters, their names in a state, wrappers (DDP, FSDP, DeepSpeed), deep copies and checkpoints see the model
they saw before.
"""

from __future__ import annotations

from torch import Tensor, nn

from drafters.eagle3_ssd.model import MLP, Attention, RMSNorm, Rotary
from train.ops.layer import op


class CompiledRMSNorm(RMSNorm):
    """`RMSNorm` in one pass over memory, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return op.rms_norm(x, self.weight, self.eps)


class CompiledMLP(MLP):
    """`MLP` whose activation and product are one pass over memory, rounded once."""

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return op.silu_mul(gate, up)


class CompiledAttention(Attention):
    """`Attention` that rotates in one pass over memory."""

    def rotate(self, x_BSXD: Tensor, cos_sin: Rotary) -> Tensor:
        """Queries or keys rotated by their positions."""
        return op.rotate(x_BSXD, *cos_sin)


COMPILED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: CompiledRMSNorm,
    MLP: CompiledMLP,
    Attention: CompiledAttention,
}


def accelerate(drafter: nn.Module) -> None:
    """Give the drafter's layers their compiled twins, in place. Twice is as once.

    Tensors that the compiled kernels do not take (another device, fp64) go through plain torch all the same.
    """
    for module in drafter.modules():
        module.__class__ = COMPILED.get(type(module), type(module))
