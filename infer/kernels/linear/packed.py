"""Linear layers as the machine likes them: weights packed once, projections that read the same input fused into one.

Applied from outside to a finished model (`fuse`, `pack`); the model's own code does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def can_pack(weight: Tensor) -> bool:
    """Packing exists for bf16 on CPU, where oneDNN is built in."""
    built_in = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return built_in and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def is_plain(module: object) -> TypeGuard[nn.Linear]:
    """An `nn.Linear` with an ordinary weight: no subclass, nothing quantised."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dtype.itemsize >= 2


class PackedLinear(nn.Module):
    """`F.linear` with the weight [out, in] laid out once for the matrix unit where that exists; same bits in the
    result.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None) if self.packed else weight.detach()
        )
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, other: Tensor) -> Tensor:
        """`other + forward(x)`, rounded once where the matrix unit can add: [..., in] and [..., out] -> [..., out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")
        return other + F.linear(x, self.weight, self.bias)


class FusedLeader(nn.Module):
    """The first of several projections of one input: computes all, returns its own part, keeps the others for
    `FusedFollower`.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self.sizes = [layer.out_features for layer in layers]
        self.linear = PackedLinear(weight, bias)
        self.source: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.source, self.parts = x, self.linear(x).split(self.sizes, dim=-1)
        return self.parts[0]


class FusedFollower(nn.Module):
    """Part `index` of what the leader computed from the same tensor. Another input is a fault of the model's code
    path.
    """

    def __init__(self, leader: FusedLeader, index: int) -> None:
        super().__init__()
        self.leader = [leader]  # in a list, so that it is not registered twice
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        leader = self.leader[0]
        assert leader.source is x, "fused projections have to read the same tensor"
        return leader.parts[self.index]


def fuse(parent: nn.Module, names: Sequence[str]) -> bool:
    """Fuse the `nn.Linear` children `names` of `parent`. Returns False, and changes nothing, where they do not fit
    together.
    """
    layers = [getattr(parent, name, None) for name in names]
    plain = [layer for layer in layers if is_plain(layer)]
    if len(plain) != len(names) or len({(p.in_features, p.bias is None, p.weight.dtype) for p in plain}) != 1:
        return False
    leader = FusedLeader(plain)
    setattr(parent, names[0], leader)
    for index, name in enumerate(names[1:], start=1):
        setattr(parent, name, FusedFollower(leader, index))
    return True


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
