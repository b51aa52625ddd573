"""Several projections of one input computed as one product, behind the names that the model's code calls them by.

Applied from outside to a finished model (`fuse`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from infer.kernels.linear.packed import PackedLinear, is_plain


class FusedLeader(nn.Module):
    """The first of several projections of one input: computes all, returns its own part, keeps the others for
    `FusedFollower`.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.linear = PackedLinear.joined(layers)
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
