"""Held-out figures against what the engine counts on the same drafter and prompts, and against hand-made rounds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from drafters.eagle3_ssd.checkpoint import LoadedDrafter, load_drafter
from drafters.eagle3_ssd.speed import StepCosts
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.draft.settings import DraftSettings
from infer.engine.request import Request, SamplingParams
from infer.evaluation.figures import hit_rate, rounds_of, tokens_per_round
from tests.replayed import complete, outline, plan_of, rows_of, serving_of, synchronous
from tests.trained import random_prompts, run
from train.config import HeldoutSettings, LossSettings
from train.objective.objective import Objective
from train.target_features.features import OnlineFeatures
from train.validation.heldout import HeldoutFigures, measure, step_costs
from train.validation.round_replay import replay

K, NEW, PROMPTS = 3, 58, 12
POLICIES = ("uniform", "geometric", "lagged")


class Pair(NamedTuple):
    target: Target
    drafter: Path
    loaded: LoadedDrafter
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def pair(trained_pair: tuple[Target, Path]) -> Pair:
    target, drafter = trained_pair
    loaded = load_drafter(drafter, target.facts, target.embed_weight, torch.float32)
    prompts = random_prompts(
        48, 4, target.facts.vocab_size, seed=5
    )  # those it was trained on: it drafts badly on others
    return Pair(target, drafter, loaded, prompts[:PROMPTS])


def settings_of(pair: Pair, **changes: object) -> EngineSettings:
    anywhere = {"target_devices": ("cpu",), "draft_devices": ("cpu",)}
    common = {
        "target": "",
        "drafter": str(pair.drafter),
        "dtype": "float32",
        "lookahead": K,
        "budget": 8,
        "batch_size": PROMPTS,
    }
    return EngineSettings.model_validate({**common, **anywhere, "max_model_len": 128, **changes})


def served(pair: Pair, settings: EngineSettings, mode: Mode) -> list[Request]:
    return run(settings, mode, pair.target, pair.prompts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"fallback_lookahead": 1, "policy": "uniform", "budget": 16}, {"refresh": 1, "lookahead": 4}, {"refresh": 3}],
    ids=str,
)
def test_replayed_rounds_are_the_engines(pair: Pair, changes: dict[str, object]) -> None:
    """Every uncut round of every request, in SSD and in SD order: hit or miss, tokens offered, tokens accepted."""
    settings = settings_of(pair, **changes)
    plan = DraftSettings.of(settings, Mode.SSD)
    requests = served(pair, settings, Mode.SSD)
    serving, answers = serving_of(pair.target, pair.loaded, requests, plan)
    ssd, sd = replay(serving, answers, [plan_of(pair.loaded, plan), synchronous(plan.lookahead)])
    hits = 0
    for request, rounds in zip(requests, ssd, strict=True):
        expected = [outline(record) for record in complete(request, plan.lookahead)]
        assert [(r.served_by_hit, r.offered, r.accepted) for r in rounds] == expected
        hits += sum(was_hit for was_hit, *_ in expected)
    assert hits > 50, "hits occur"
    for request, rounds in zip(served(pair, settings, Mode.SD), sd, strict=True):
        assert [(r.offered, r.accepted) for r in rounds] == [
            outline(record)[1:] for record in complete(request, plan.lookahead)
        ]


@pytest.fixture(scope="module")
def figures(pair: Pair) -> HeldoutFigures:
    requests = served(pair, settings_of(pair), Mode.AR)
    source = OnlineFeatures(pair.target, rows_of(requests), pair.loaded.config.tap_hidden_states_ids)
    head = pair.target.head.rows(pair.loaded.vocab.draft_to_target)
    objective = Objective(pair.loaded.model, head, pair.loaded.vocab.draft_to_target, LossSettings(), torch.float32)
    settings = HeldoutSettings(lookahead=K, budgets=(4, 8), refresh=(0, K))
    return measure(objective, pair.loaded.vocab, source, settings, 10, StepCosts(0.1, 0.01))


def test_figures_agree_with_what_the_engine_measures(pair: Pair, figures: HeldoutFigures) -> None:
    """Tokens per round within 3 %, hit rate within 2 points; the engine's include the rounds that an answer's end
    cuts.
    """
    sd = rounds_of(served(pair, settings_of(pair), Mode.SD))
    ssd = rounds_of(served(pair, settings_of(pair, policy="uniform"), Mode.SSD))
    assert figures.values["tau_fresh"] == pytest.approx(tokens_per_round(sd), rel=0.03)
    uniform = next(entry for entry in figures.values["uniform"] if entry["budget"] == 8)
    assert uniform["tau"] == pytest.approx(tokens_per_round(ssd), rel=0.03)
    assert uniform["hit_rate"] == pytest.approx(hit_rate(ssd), abs=0.02)


def test_figures_obey_their_laws(figures: HeldoutFigures) -> None:
    values = figures.values
    assert values["answers"] == values["answers_replayed"] == PROMPTS
    taus = [entry["tau"] for entry in values["sd"]]
    assert taus == sorted(taus) and taus[-1] == values["tau_fresh"]
    accuracy, recall = values["accuracy"], values["recall_after_rejection"]
    assert len(accuracy) == 2 * K + 1 and accuracy[0] > accuracy[-1]
    assert all(row == sorted(row) for row in recall)
    for name in (*POLICIES, f"refresh {K}"):
        small, large = values[name]
        assert (small["budget"], large["budget"]) == (4, 8) and small["hit_rate"] < large["hit_rate"]
    assert values["lagged"][0]["hit_rate"] >= values["uniform"][0]["hit_rate"], (
        "where the budget is short, the tables spread it better"
    )
    assert values["predicted_speed"] == max(
        e["predicted_speed"] for name in (*POLICIES, f"refresh {K}") for e in values[name]
    )
    low, high = values["lagged"][1]["retention_interval"]
    assert low <= values["lagged"][1]["retention"] <= high
    assert sum(bucket["rounds"] for bucket in values["by_position"]) == values["rounds_fresh"]
    card = figures.for_serving()
    assert sum(card["measured_lagged"].reach) == pytest.approx(1.0) and card["confidence_lagged"].slope > 0


def test_costs_follow_from_the_sizes_or_the_settings(pair: Pair) -> None:
    target = load_target(str(pair.drafter.parent / "target"), "float32", fuse_layers=False)  # as training loads it
    costs = step_costs(HeldoutSettings(), pair.loaded.model, target)
    layer = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 64 + 2 * 32  # q, k and v, o; the MLP; two norms
    drafter = (
        layer + 32 * 64 + 32 + 32 + 256 * 32
    )  # the first layer reads 64 inputs, and has a norm more; final norm, head
    read = 6 * layer + 32 + 259 * 32
    assert costs.step == pytest.approx(drafter / read, rel=0.01) and costs.row == 0.03
    given = step_costs(HeldoutSettings(step_share=0.2, row_share=0.5), pair.loaded.model, target)
    assert given == StepCosts(0.2, 0.5)
