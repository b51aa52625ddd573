"""Random numbers keyed by (seed, position, purpose): the same whatever else is in the batch (infer/README.md, section
2).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is drawn for. Each purpose has its own stream."""

    DRAFT = 1
    ACCEPT = 2
    BONUS = 3  # the token after the accepted ones, from the residual or from p_K


def uniform(seed: int, position: int, purpose: Purpose, place: int = 0) -> float:
    """A number in [0, 1) that depends on nothing but its four keys (53 bits; splitmix64, chained over the keys).

    `position` is the absolute position of the token that the draw decides. `place` is the distance to the last
    committed token and is given for `DRAFT` only: a position may be drafted again after a rejection, and whether a
    look-up hits may depend on the tokens drafted there before. With the place in the key a token that is served never
    reuses a number that was used before.
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ (position & _MASK))
    state = _mix(state ^ (int(purpose) | place << 8))
    return (state >> 11) * 2.0**-53


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, places: Sequence[int] | None = None
) -> Tensor:
    """`uniform` row by row: fp64 [R]."""
    assert len(seeds) == len(positions), (len(seeds), len(positions))
    values = [uniform(s, p, purpose, m) for s, p, m in zip(seeds, positions, places or [0] * len(seeds), strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a prompt that is to be answered several times: for the first one `seed` itself."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) ^ index) >> 1


def _mix(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
