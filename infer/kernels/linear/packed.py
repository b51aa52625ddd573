"""A linear layer for inference that takes the fastest implementation of its weight, chosen once when it is made.

Packed on a CPU in bf16 (`cpu`), else `F.linear` (`reference`). Applied from outside to a finished model (`pack`); the
model's own code does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from infer.kernels.linear import cpu, reference


def is_plain(module: object) -> TypeGuard[nn.Linear]:
    """An `nn.Linear` with an ordinary weight: no subclass, nothing quantised."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype.itemsize >= 2


class PackedLinear(nn.Module):
    """`F.linear` with a weight [out, in] laid out for the machine; the same bits in the result."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = cpu.available(weight)
        self.weight = cpu.pack(weight.detach()) if self.packed else weight.detach()
        self.bias = None if bias is None else bias.detach()

    @staticmethod
    def joined(layers: Sequence[nn.Linear]) -> PackedLinear:
        """Projections of one input as one layer, their outputs behind each other."""
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return PackedLinear(torch.cat([layer.weight for layer in layers]), bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return (cpu if self.packed else reference).linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, other: Tensor) -> Tensor:
        """`other + forward(x)`, rounded once where the weight is packed: [..., in] and [..., out] -> [..., out]."""
        return (cpu if self.packed else reference).linear_add(x, other, self.weight, self.bias)


def pack(model: nn.Module) -> int:
    """Replace every remaining `nn.Linear` below `model` by a `PackedLinear`. Returns how many were replaced."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child.weight, child.bias))
    return len(found)
