"""What an engine answered, as held-out rows, to compare figures without the engine with those that it counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data.chat.pack import PackedRow
from drafters.eagle3_ssd.checkpoint import LoadedDrafter
from drafters.eagle3_ssd.outcomes import fan_out, statistics_of
from drafters.targets.target import Target
from infer.draft.settings import DraftSettings
from infer.engine.request import Request, RoundRecord
from infer.ipc.messages import Source
from train.objective.unroll import Rows
from train.target_features.features import Features, compute_features
from train.validation.heldout import find_answers
from train.validation.round_replay import FanOutPlan
from train.validation.served_drafting import AnswerSpan, ServedDrafter, true_slots


def rows_of(requests: Sequence[Request]) -> list[PackedRow]:
    """One row for each request, all of one length."""
    length = max(len(request.tokens) for request in requests)
    rows = []
    for request in requests:
        tokens, turns, documents, positions = (np.zeros(length, dtype=np.int64) for _ in range(4))
        count, prompt = len(request.tokens), len(request.prompt_ids)
        tokens[:count], turns[prompt:count], documents[:count], positions[:count] = (
            request.tokens,
            1,
            1,
            np.arange(count),
        )
        rows.append(PackedRow(tokens, turns, documents, positions))
    return rows


@torch.no_grad()
def serving_of(
    target: Target, loaded: LoadedDrafter, requests: Sequence[Request], plan: DraftSettings
) -> tuple[ServedDrafter, list[AnswerSpan]]:
    """The drafting side of these requests as training replays it, and where their answers are."""
    features: Features = compute_features(target, rows_of(requests), loaded.config.tap_hidden_states_ids)
    rows = Rows(features.token_ids, features.positions, features.document_ids)
    slots = true_slots(loaded.model, rows, loaded.model.fuse(features.taps))
    return ServedDrafter(loaded.model, loaded.vocab, rows, slots, plan.lookahead, plan.refresh), [
        answer for answer, _ in find_answers(features)
    ]


def plan_of(loaded: LoadedDrafter, plan: DraftSettings) -> FanOutPlan:
    """The branches that the draft process prepares by its plan and the drafter's card."""
    fans = [
        fan_out(plan.policy, length, plan.budget, statistics_of(loaded.card, after_hit))
        for length, after_hit in ((plan.jit_lookahead, False), (plan.lookahead, True))
    ]
    return FanOutPlan(*fans)


def synchronous(lookahead: int) -> FanOutPlan:
    """The plan of mode sd."""
    return FanOutPlan((0,) * (lookahead + 1), (0,) * (lookahead + 1))


def complete(request: Request, lookahead: int) -> list[RoundRecord]:
    """The rounds that start at least K + 1 tokens before the answer's end, so that nothing cuts them."""
    left, kept = len(request.new_tokens) - 1, []
    for record in request.rounds:
        if left <= lookahead:
            break
        kept.append(record)
        left -= record.emitted
    return kept


def outline(record: RoundRecord) -> tuple[bool, int, int]:
    """What a replay tells of a round: served by a hit or not, offered, accepted."""
    return record.source is Source.HIT, record.offered, record.accepted
