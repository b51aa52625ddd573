"""The plan's formulas against what torch counts: parameters, supervised predictions, FLOPs of a real forward and
backward pass.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.targets.head import TargetHead
from tests.cpu.train.small import DRAFT_VOCAB, HIDDEN, TWO_ROWS, packed, small_config, small_drafter
from train.config import LossSettings
from train.costs.plan import Forward, Replayed, flops, forwards, parameters, predictions, products
from train.objective.objective import Anchors, Objective, Rounds, Scales, choose_anchors, count
from train.target_features.features import Features

TURNS = [[4, 5], [2, 4]]  # the turns of TWO_ROWS
LENGTH = 14


def batch(depth: int, anchors_per_row: int | None = None) -> tuple[Features, Anchors, Forward]:
    """Packed rows, anchors, and the plan's description of both."""
    features = packed(TWO_ROWS, LENGTH)
    anchors = choose_anchors(features, anchors_per_row, ["a", "b"])
    sampled = tuple(int(number) for number in count(features, anchors, depth).sampled)
    return features, anchors, Forward(2, LENGTH, anchors.places.shape[1], sampled, int((features.turn_ids > 0).sum()))


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_the_models(layers: int) -> None:
    with torch.device("meta"):
        model = Eagle3Drafter(small_config(layers))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert parameters(small_config(layers)) == (trained, sum(p.numel() for p in model.parameters()) - trained)


def test_predictions_are_those_that_training_supervises() -> None:
    features, anchors, forward = batch(depth=3)
    assert forward.predictions == tuple(sum(predictions(turns, d) for turns in TURNS) for d in range(4))
    assert [forward] == forwards(TURNS, LENGTH, 3, None, 8)


def test_sampled_anchors_are_counted_as_expected() -> None:
    cut = forwards([[10], [4, 10]], 32, 2, 4, rows_per_forward=2)[0]
    assert cut.anchors == 4 and cut.predictions == (9 + 3 + 9, 4 + 4, round(4 * 7 / 8 + 4 * 8 / 10))
    uneven = forwards([[10], [4], [6]], 32, 1, None, rows_per_forward=2)
    assert [(f.rows, f.anchors) for f in uneven] == [(2, 8), (1, 4)]


@pytest.fixture
def without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that only fill up a shape are no work, and not planned as such."""
    monkeypatch.setattr("train.ops.products.PADDED", 1)


@pytest.mark.usefixtures("without_padding")
@pytest.mark.parametrize(("layers", "refresh"), [(1, 0), (3, 1)])
def test_flops_of_a_replayed_round_are_what_torch_counts(layers: int, refresh: int) -> None:
    features, anchors, forward = batch(depth=5)
    shifts = torch.where(anchors.places == 7, 1, 0)
    anchors = anchors._replace(rounds=Rounds(shifts, torch.ones_like(shifts), 2, refresh))
    computed = tuple(int(number) for number in count(features, anchors, 5).sampled)
    forward = forward._replace(predictions=computed, replay=Replayed(lookahead=2, stale=2, refresh=refresh))
    objective = Objective(
        small_drafter(layers),
        TargetHead(torch.randn(DRAFT_VOCAB, HIDDEN)),
        torch.arange(DRAFT_VOCAB),
        LossSettings(),
        torch.float32,
    )
    with FlopCounterMode(display=False) as counter:
        loss, _ = objective(features, anchors, 5, Scales([1.0] * 6, [1.0] * 6))
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == flops(p for p in products(objective.drafter.config, forward) if p.batch == 1)


@pytest.mark.usefixtures("without_padding")
@pytest.mark.parametrize("layers", [1, 3])
def test_flops_are_what_torch_counts(layers: int) -> None:
    """Forward and backward of the objective, the head's included. Products with own keys are compiled: torch does not
    see them.
    """
    features, anchors, forward = batch(depth=3)
    head = TargetHead(torch.randn(DRAFT_VOCAB, HIDDEN))
    objective = Objective(small_drafter(layers), head, torch.arange(DRAFT_VOCAB), LossSettings(), torch.float32)
    with FlopCounterMode(display=False) as counter:
        loss, _ = objective(features, anchors, 3, Scales([1.0] * 4, [1.0] * 4))
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    planned = products(objective.drafter.config, forward)
    assert counted[torch.ops.aten.mm] == flops(p for p in planned if p.batch == 1)
    shared = flops(p for p in planned if p.batch > 1 and not p.name.startswith("own"))
    # forward two, backward four, and one more that is no work: the backward pass computes the scores again
    assert counted[torch.ops.aten.bmm] == shared * 7 / 6
