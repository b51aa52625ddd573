"""Retention: tokens per round of served speculations over those of fresh drafts (infer/README.md, section 3).

Replayed offline. At the context of each hit round the same drafter drafts K tokens from true target features, and both
drafts are compared with the tokens that the answer went on with. Only for greedy answers: there the target's choice at
a context does not depend on what was drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.checkpoint import LoadedDrafter, load_drafter
from drafters.eagle3_ssd.speed import PairedTokens
from drafters.targets.taps import tap_features
from drafters.targets.target import DTYPES, Target
from infer.config import EngineSettings, Mode
from infer.draft.model import DraftModel
from infer.draft.settings import DraftSettings
from infer.draft.state import DraftRequest
from infer.draft.worker import DraftWorker
from infer.engine.request import Request
from infer.ipc.messages import Source

AT_ONCE = 8  # answers drafted for side by side


class HitRound(NamedTuple):
    """The number of tokens committed before a hit round, and how many of the served ones it accepted."""

    committed: int
    accepted: int


def hit_rounds(answer: Request, lookahead: int) -> list[HitRound]:
    """The hit rounds of an answer, without those so near its end that K tokens and a bonus token do not fit."""
    committed, contexts = len(answer.prompt_ids) + 1, []
    for record in answer.rounds:
        if record.source is Source.HIT and committed + lookahead < len(answer.tokens):
            contexts.append(HitRound(committed, record.accepted))
        committed += record.emitted
    return contexts


@torch.inference_mode()
def paired_tokens(answers: Sequence[Request], settings: EngineSettings, target: Target) -> Iterator[PairedTokens]:
    """Of each answer in turn, the accepted tokens of its hit rounds: of the served and of fresh speculations."""
    assert settings.drafter is not None and all(answer.params.sampling.greedy for answer in answers), (
        "greedy answers of a speculating mode"
    )
    loaded = load_drafter(settings.drafter, target.facts, target.embed_weight, DTYPES[settings.dtype], target.device)
    longest = max((len(answer.tokens) for answer in answers), default=0)
    draft_settings = DraftSettings.of(
        settings.model_copy(update={"max_model_len": longest, "batch_size": AT_ONCE}), Mode.SD
    )
    worker = DraftWorker(DraftModel(loaded, AT_ONCE * draft_settings.region_tokens), draft_settings)
    for first in range(0, len(answers), AT_ONCE):
        yield from _paired(answers[first : first + AT_ONCE], worker, loaded, target)


def _paired(
    answers: Sequence[Request], worker: DraftWorker, loaded: LoadedDrafter, target: Target
) -> list[PairedTokens]:
    K = worker.settings.lookahead
    contexts = [hit_rounds(answer, K) for answer in answers]
    features = [
        _features(answer, loaded, target) if found else None for answer, found in zip(answers, contexts, strict=True)
    ]
    requests = [_request(answer, worker) for answer in answers]
    fresh = [0] * len(answers)
    for number in range(max(map(len, contexts), default=0)):
        active = [i for i, found in enumerate(contexts) if number < len(found)]
        for i in active:
            committed, seen = contexts[i][number].committed, contexts[i][number - 1].committed if number else 1
            features_TH = features[i]
            assert features_TH is not None, answers[i].id
            requests[i].tokens, requests[i].pending_SH = (
                answers[i].tokens[:committed],
                features_TH[seen - 1 : committed - 1],
            )
        for i, speculation in zip(active, worker.draft_now([requests[i] for i in active]), strict=True):
            fresh[i] += _leading(speculation.tokens, answers[i].tokens[contexts[i][number].committed :])
    for request in requests:
        worker.model.blocks.free(request.blocks)
    return [PairedTokens(len(found), sum(c.accepted for c in found), fresh[i]) for i, found in enumerate(contexts)]


def _features(answer: Request, loaded: LoadedDrafter, target: Target) -> Tensor:
    """The fused features [T, H] of the whole answer, prompt included, by one forward."""
    ids = torch.tensor([answer.tokens], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    taps = tap_features(target, ids, positions, torch.ones_like(ids), loaded.config.tap_hidden_states_ids).taps_BTC
    return loaded.model.fuse(taps[0])


def _request(answer: Request, worker: DraftWorker) -> DraftRequest:
    pool, end = worker.model.blocks, len(answer.tokens) + worker.settings.lookahead
    blocks = pool.allocate(pool.blocks_for(end))
    assert blocks is not None, f"the pool is made for {AT_ONCE} answers of this length"
    nothing = worker.model.embeddings.new_empty(0, worker.model.config.hidden_size)
    return DraftRequest(answer.id, [], answer.params.sampling, blocks, end, nothing, len(answer.prompt_ids))


def _leading(drafted: Sequence[int], written: Sequence[int]) -> int:
    """How many drafted tokens equal the written ones, up to the first that differs."""
    right = [a == b for a, b in zip(drafted, written, strict=False)]
    return right.index(False) if False in right else len(right)
