"""Retention replayed from an engine's records: the fresh drafts against training's replay of the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.eagle3_ssd.speed import PairedTokens
from drafters.targets.target import Target
from infer.config import EngineSettings, Mode
from infer.draft.settings import DraftSettings
from infer.engine.request import Request, RoundRecord, SamplingParams
from infer.evaluation.results import retention_record
from infer.evaluation.retention import hit_rounds, paired_tokens
from infer.ipc.messages import Source
from tests.replayed import plan_of, serving_of
from tests.trained import random_prompts, run
from train.validation.round_replay import replay


@pytest.mark.parametrize("lookahead", [2, 4])
def test_fresh_drafts_are_those_of_the_replay(trained_pair: tuple[Target, Path], lookahead: int) -> None:
    """Ten answers, more than are drafted for at once; a tail of tokens that the drafter was not trained on."""
    target, drafter = trained_pair
    common = {
        "target": "",
        "drafter": str(drafter),
        "dtype": "float32",
        "target_devices": ("cpu",),
        "draft_devices": ("cpu",),
    }
    settings = EngineSettings.model_validate(
        {**common, "lookahead": lookahead, "budget": 16, "batch_size": 10, "max_model_len": 96}
    )
    prompts = random_prompts(48, 4, target.facts.vocab_size, seed=5)[:10]
    requests = run(settings, Mode.SSD, target, prompts, SamplingParams(max_new_tokens=70, ignore_eos=True))
    pairs = list(paired_tokens(requests, settings, target))
    loaded = load_drafter(drafter, target.facts, target.embed_weight, torch.float32)
    plan = DraftSettings.of(settings, Mode.SSD)
    serving, answers = serving_of(target, loaded, requests, plan)
    (replayed,) = replay(serving, answers, [plan_of(loaded, plan)])
    hits = [[r for r in rounds if r.served_by_hit] for rounds in replayed]
    assert pairs == [PairedTokens(len(h), sum(r.accepted for r in h), sum(r.fresh for r in h)) for h in hits]
    assert sum(pair.rounds for pair in pairs) > 40 and any(pair.served != pair.fresh for pair in pairs)
    record = retention_record(pairs)
    assert record is not None
    assert record["value"] == pytest.approx(record["tokens_per_round_served"] / record["tokens_per_round_fresh"])


def test_rounds_that_the_end_cuts_are_left_out() -> None:
    def record(source: Source, accepted: int) -> RoundRecord:
        return RoundRecord(source, 3, accepted, accepted + 1, 0.0, 0.0, 0.0)

    answer = Request(
        "r", (1, 2), SamplingParams(), frozenset(), 100, list(range(14))
    )  # 12 new tokens, the first from the prompt
    answer.rounds = [
        record(Source.FIRST, 3),
        record(Source.HIT, 1),
        record(Source.JIT, 0),
        record(Source.HIT, 2),
        record(Source.HIT, 1),
    ]
    # committed before each round: 3, 7, 9, 10, 13
    assert hit_rounds(answer, 3) == [(7, 1), (10, 2)]  # 10 + 3 + 1 tokens are there
    assert hit_rounds(answer, 4) == [(7, 1)]
    assert retention_record([PairedTokens(0, 0, 0)]) is None
