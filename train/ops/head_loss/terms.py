"""What the head's losses are given, and what they count of each prediction.

P positions with a teacher, n supervised predictions, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Teacher(NamedTuple):
    """The target's predictions at P positions: probabilities of the draft vocabulary [P, Vd], and the argmax over all
    tokens [P].

    `best` is the argmax as a draft id, meaningless where `inside` is false: there the argmax has none.
    """

    probs: Tensor
    best: Tensor
    inside: Tensor


class LossOptions(NamedTuple):
    """Weights of the base loss's two parts, and how the bonus loss drafts: greedily, or by sampling at temperature 1.

    `fan_out` is the F by which `PredictionStats` counts what SSD would have cached.
    """

    cross_entropy: float
    total_variation: float
    bonus_temperature: int = 0
    fan_out: int = 4


class PredictionStats(NamedTuple):
    """Columns of what is counted of each prediction; where tokens are compared, the target is greedy."""

    cross_entropy: Any
    rejection: Any  # expected, 1 - sum min(p, q)
    correct: Any  # the drafter's argmax is the target's
    listed: Any  # the target's argmax is in the top F: the outcome is cached after full acceptance
    found: Any  # it is not drafted, and in the top F of the rest: cached after a rejection
    missing: Any  # the target's mass outside the draft vocabulary
    bonus: Any  # the bonus loss, where it is trained


class HeadLosses(NamedTuple):
    """`loss` carries the gradient; `stats_nC` has the columns of `PredictionStats`, detached."""

    loss: Tensor
    stats_nC: Tensor
