"""Linear layers in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out]."""
    return F.linear(x, weight, bias)


def linear_add(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`other + linear(x)`: [..., in] and [..., out] -> [..., out]."""
    return other + F.linear(x, weight, bias)
