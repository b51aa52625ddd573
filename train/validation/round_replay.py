"""Rounds of serving replayed over held-out answers, without the engine (train/README.md, section 4). Greedy.

A held-out answer is the path that the target takes, so what each round accepts, and whether its outcome was prepared
for, follow from the drafter alone (`served_drafting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from train.validation.served_drafting import AnswerSpan, ServedDrafter, State, fits


class FanOutPlan(NamedTuple):
    """The branches prepared at each k. `after_hit` has K + 1 entries, `after_miss` L + 1 for the L tokens drafted
    after a miss.

    All zero: no outcome is looked up and every round drafts anew, as synchronous speculation does.
    """

    after_miss: tuple[int, ...]
    after_hit: tuple[int, ...]

    @property
    def looks_up(self) -> bool:
        """Whether anything is prepared."""
        return any(self.after_miss) or any(self.after_hit)


class Round(NamedTuple):
    """One verification."""

    slot: int  # newest slot with a true feature; the token behind it was committed last
    offered: int
    accepted: int
    fresh: int  # accepted of K tokens drafted from true features at the same place
    served_by_hit: bool
    place: (
        int | None
    )  # of the bonus token among the candidates at k = accepted; None: not in the draft vocabulary, or not looked up
    confidences: tuple[float, ...]  # the drafter's probability of each token up to the first rejected one


@dataclass
class _Cursor:
    """One plan on its way through one answer."""

    answer: AnswerSpan
    plan: FanOutPlan
    slot: int
    state: State | None = None  # None: the next speculation is drafted from true features
    rounds: list[Round] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        return self.answer.row, self.slot

    def advance(self, state: State, fresh: State) -> None:
        """Count the round and go to the place after it."""
        k, by_hit = state.accepted, self.state is not None
        fan = self.plan.after_hit if by_hit else self.plan.after_miss
        place = state.place if self.plan.looks_up else None
        self.rounds.append(Round(self.slot, len(fan) - 1, k, fresh.accepted, by_hit, place, tuple(state.confidences)))
        hit = place is not None and place < fan[k]
        assert not hit or state.after_hit is not None, "the branch of a hit was not drafted"
        self.state = state.after_hit if hit else None
        self.slot += k + 1


@torch.no_grad()
def replay(
    serving: ServedDrafter, answers: Sequence[AnswerSpan], plans: Sequence[FanOutPlan]
) -> list[list[list[Round]]]:
    """The rounds of each answer under each plan: `result[plan][answer]`. All advance together, one round at a time."""
    cursors = [[_Cursor(answer, plan, answer.first - 1) for answer in answers] for plan in plans]
    going = [cursor for line in cursors for cursor in line]
    K = serving.lookahead
    looking = [plan for plan in plans if plan.looks_up]
    widest = [max((fan[k] for plan in looking for fan in plan if k < len(fan)), default=0) for k in range(K + 1)]
    serving.draft_fresh(
        (a.row, slot) for a in answers for slot in range(a.first - 1, a.last) if fits(slot, K, a)
    )  # most will be needed
    while going := [cursor for cursor in going if fits(cursor.slot, K, cursor.answer)]:
        states = [cursor.state or serving.fresh(*cursor.place, len(cursor.plan.after_miss) - 1) for cursor in going]
        looked_up = [state for state, cursor in zip(states, going, strict=True) if cursor.plan.looks_up]
        serving.follow(looked_up, widest)
        for cursor, state in zip(going, states, strict=True):
            cursor.advance(state, serving.fresh(*cursor.place, K))
    return [[cursor.rounds for cursor in line] for line in cursors]
