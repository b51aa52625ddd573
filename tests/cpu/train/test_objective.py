"""The loss of a batch: normalised by supervised predictions, so its gradient knows nothing of padding, batching or
processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drafters.base.serving import ServingSettings
from drafters.targets.head import TargetHead
from tests.cpu.train import small
from tests.cpu.train.small import DRAFT_VOCAB, HIDDEN, TWO_ROWS, VOCAB, small_drafter
from train.config import LossSettings, Stage
from train.objective.objective import Anchors, Counts, Objective, Rounds, Scales, choose_anchors, count, step_values
from train.objective.supervision import loss_scales, supervised
from train.objective.unroll import Rows, first_step, glue_replay, stale_features, unroll
from train.objective.visits import Rates, depth_weights, visits
from train.ops.head_loss.op import teacher_probabilities
from train.ops.head_loss.reference import bonus_greedy, soft_cross_entropy, total_variation
from train.ops.head_loss.terms import PredictionStats
from train.target_features.features import Features
from train.trainer.step import scales_of

DEPTH = 3
LONG_ROWS = [[(20, [0] * 3 + [1] * 12 + [0] * 2 + [2] * 3)], [(4, [0, 0, 1, 1]), (15, [0, *[1] * 14])]]
SETTINGS = LossSettings(cross_entropy=0.7, total_variation=0.4, bonus=0.6, gamma=0.8)
VOCABULARY = torch.tensor(sorted({*range(1, VOCAB, 2), 0, 10, 20, 30}))


def objective(layers: int = 2) -> Objective:
    drafter = small_drafter(layers)
    drafter.embed_tokens.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    return Objective(drafter, TargetHead(head), VOCABULARY, SETTINGS, torch.float32)


def packed(layout: list[list[tuple[int, list[int]]]], length: int) -> Features:
    """Rows whose teacher has a tenth of its mass outside the draft vocabulary."""
    features = small.packed(layout, length)
    inside = objective().target_head(features.last_hidden).logsumexp(-1)
    return features._replace(log_normaliser=inside - math.log(0.9))


def gradient(model: Objective, batches: list[tuple[Features, Anchors]], depth: int = DEPTH) -> list[Tensor]:
    """As the loop does it: counts over all batches first, then one backward for each."""
    counts = [count(features, anchors, depth) for features, anchors in batches]
    total = Counts(*(torch.stack(numbers).sum(0) for numbers in zip(*counts, strict=True)))
    stage = Stage(steps=1, depth=depth, replay=batches[0][1].rounds is not None)
    scales = scales_of(SETTINGS, stage, depth_weights(SETTINGS, ServingSettings(), depth, ()), total)
    model.zero_grad()
    for features, anchors in batches:
        model(features, anchors, depth, scales)[0].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def rows(features: Features, chosen: list[int]) -> Features:
    return Features(*(tensor[chosen] for tensor in features))


def all_anchors(features: Features) -> Anchors:
    return choose_anchors(features, None, [""] * len(features.token_ids))


K = 2
SERVING = visits(
    Rates([0.6] * 8, [0.8] * 8, [0.2] * 8), K, max_shift=3
)  # each round of serving that fits is likely enough to be drawn


def replayed(features: Features, keys: Sequence[str] = ("a", "b")) -> Anchors:
    return choose_anchors(features, None, keys, SERVING)


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 10
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=3e-5)


def test_loss_is_the_average_over_supervised_predictions() -> None:
    model, features = objective(), packed(TWO_ROWS, 14)
    anchors = all_anchors(features)
    counts = count(features, anchors, DEPTH)
    scales = [loss_scales([0.8**d for d in range(DEPTH + 1)], counts.all.tolist(), counts.sampled.tolist())] * 2
    loss, sums = model(features, anchors, DEPTH, Scales(*scales))

    drafter, every = model.drafter, torch.arange(13).expand(2, 13)
    fused = drafter.fuse(features.taps)
    steps = unroll(drafter, Rows(features.token_ids, features.positions, features.document_ids), fused, every, DEPTH)
    want, number, number_outside = torch.zeros(()), 0, 0
    for d, hidden in enumerate(steps):
        mask = supervised(features.document_ids, features.turn_ids, every, d)
        for row, anchor in mask.nonzero().tolist():
            place = anchor + d + 1  # the target's state there predicts token anchor + d + 2
            at = (torch.tensor([row]), torch.tensor([place]))
            teacher = teacher_probabilities(features.last_hidden[at], model.target_head, features.log_normaliser[at])
            logits = drafter.logits(hidden[row, anchor])[None]
            best = (
                VOCABULARY.tolist().index(int(features.argmax[at])) if int(features.argmax[at]) in VOCABULARY else None
            )
            cached = bonus_greedy(logits, torch.tensor([best or 0]), torch.tensor([best is not None]))
            want = (
                want
                + 0.8**d
                * (
                    0.7 * soft_cross_entropy(logits, teacher) + 0.4 * total_variation(logits, teacher) + 0.6 * cached
                ).sum()
            )
            number_outside += best is None
            number += 1
    torch.testing.assert_close(loss, want / number, rtol=1e-5, atol=1e-6)
    assert number == counts.all.sum() and 0 < number_outside < number
    figures = PredictionStats(*sums.sum(0))
    assert figures.missing.item() == pytest.approx(0.1 * number, rel=1e-2)
    assert 0 < figures.found <= number - number_outside - figures.correct


@pytest.mark.parametrize("replay", [False, True])
def test_gradient_does_not_depend_on_padding(replay: bool) -> None:
    model, anchors = objective(), replayed if replay else all_anchors
    short = packed(LONG_ROWS, 20)
    more = 9
    longer = Features(*(torch.cat((x, torch.zeros(2, more, *x.shape[2:], dtype=x.dtype)), dim=1) for x in short))
    assert_same(*(gradient(model, [(features, anchors(features))], depth=7) for features in (short, longer)))


@pytest.mark.parametrize("replay", [False, True])
def test_gradient_does_not_depend_on_micro_batching(replay: bool) -> None:
    model, features = objective(), packed(LONG_ROWS, 20)
    parts = [rows(features, [row]) for row in (1, 0)]
    alone = [
        (part, replayed(part, key) if replay else all_anchors(part)) for part, key in zip(parts, "ba", strict=True)
    ]
    assert_same(
        gradient(model, [(features, replayed(features) if replay else all_anchors(features))], depth=7),
        gradient(model, alone, depth=7),
    )


@pytest.mark.parametrize("replay", [False, True])
def test_gradient_gathered_over_steps_is_the_same_with_fewer_products(replay: bool) -> None:
    model, features = objective(), packed(LONG_ROWS, 20)
    batch = (features, replayed(features) if replay else all_anchors(features))
    found = []
    for model.weights_are_whole in (False, True):
        with small.ProductRows() as products:
            found.append((gradient(model, [batch], depth=7), len(products.rows)))
    (plain, many), (gathered, fewer) = found
    assert_same(gathered, plain)
    assert fewer < 0.9 * many


def test_rounds_are_drawn_as_often_as_serving_visits_them() -> None:
    turns = [0, *[1] * 1999]
    features = small.packed([[(2000, turns)]], 2000)
    rounds = choose_anchors(features, None, ["a"], SERVING).rounds
    assert rounds is not None and rounds.lookahead == K
    shifts, forks = rounds.shifts[0, :1990], rounds.forks[0, :1990]
    shares = torch.bincount(shifts, minlength=4) / len(shifts)
    torch.testing.assert_close(shares, torch.tensor(SERVING.shifts), rtol=0, atol=0.04)
    for shift in range(4):
        reached = [(forks[shifts == shift] >= k).float().mean().item() for k in range(K + 1)]
        assert reached == pytest.approx(SERVING.reach[shift], abs=0.09)


@pytest.mark.parametrize("refresh", [0, 1])
def test_loss_of_replayed_rounds_by_hand(refresh: int) -> None:
    """Glue slots and branch steps one by one: which token they predict, at which depth they count, where the bonus
    loss is trained.
    """
    model, features, depth = objective(), packed(LONG_ROWS, 20), 7
    places = torch.tensor([[3, 5, 8], [4, 6, 13]])
    rounds = Rounds(torch.tensor([[3, 1, 0], [2, 0, 1]]), torch.tensor([[1, 2, 0], [0, 2, 1]]), K, refresh)
    anchors = Anchors(places, torch.tensor([[True, True, True], [True, True, False]]), rounds)
    scales = Scales([0.1 * (d + 1) for d in range(8)], [0.3 + 0.1 * d for d in range(8)])
    loss, sums = model(features, anchors, depth, scales)

    drafter, data = model.drafter, Rows(features.token_ids, features.positions, features.document_ids)
    first = first_step(drafter, data, drafter.fuse(features.taps))
    stale = stale_features(drafter, data, first, places, rounds.shifts, K)
    replay = glue_replay(drafter, data, first, places + rounds.shifts, stale, rounds.forks, refresh)
    want, numbers, forks = torch.zeros(()), [0] * 8, [0] * 8

    def add(row: int, token: int, turn_from: int, at: int, is_fork: bool, hidden: Tensor) -> None:
        nonlocal want
        turns = features.turn_ids[row].tolist()
        if token >= 20 or turns[token] == 0 or turns[token] != turns[turn_from]:
            return
        place = (torch.tensor([row]), torch.tensor([token - 1]))
        teacher = teacher_probabilities(features.last_hidden[place], model.target_head, features.log_normaliser[place])
        logits = drafter.logits(hidden)[None]
        best = (
            VOCABULARY.tolist().index(int(features.argmax[place]))
            if int(features.argmax[place]) in VOCABULARY
            else None
        )
        cached = bonus_greedy(logits, torch.tensor([best or 0]), torch.tensor([best is not None]))[0]
        base = (0.7 * soft_cross_entropy(logits, teacher) + 0.4 * total_variation(logits, teacher))[0]
        want = want + scales.base[at] * base + (0.6 * scales.bonus[at] * cached if is_fork else 0.0)
        numbers[at] += 1
        forks[at] += is_fork

    for row in range(2):
        for slot in range(19):
            add(row, slot + 2, slot + 1, 0, True, first.hidden[row, slot])
        for column in range(3):
            if not anchors.valid[row, column]:
                continue
            origin, shift, fork = (int(x[row, column]) for x in (places, rounds.shifts, rounds.forks))
            for j in range(1, K + 1):
                at = j if j <= refresh else shift + j
                add(row, origin + shift + j + 2, origin + 1, at, j <= fork and j < K, replay.glue[row, column, j])
            for m in range(1, K + 1):
                at = (fork if fork <= refresh else shift + fork) + m
                add(row, origin + shift + fork + m + 2, origin + 1, at, False, replay.branch[row, column, m - 1])
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    counts = count(features, anchors, depth)
    assert counts.sampled.tolist() == numbers and counts.forks.tolist() == forks and sum(forks[1:]) == 3
    assert sums.shape == (8, len(PredictionStats._fields)) and (sums[6].abs().sum() > 0) == (refresh == 0)


def test_replayed_gradients_in_bf16_are_close_to_those_in_fp32() -> None:
    """Steps without a gradient run under the same autocast: its weight cache must not lose the others' gradients."""
    model, features = objective(), packed(LONG_ROWS, 20)
    exact = gradient(model, [(features, replayed(features))], depth=7)
    model.dtype = torch.bfloat16
    rounded = gradient(model, [(features, replayed(features))], depth=7)
    for a, b in zip(exact, rounded, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.95


def test_sampled_anchors_are_unbiased() -> None:
    """One anchor a row, each in turn: the average gradient over all choices is the full one (each row has equally
    many).
    """
    layout = [[(8, [0, 0, 1, 1, 1, 1, 1, 1])], [(9, [0, 0, 0, 1, 1, 1, 1, 1, 1])]]
    model, features = objective(1), packed(layout, 12)
    full = all_anchors(features)
    depth_one = full.places.shape[1]
    assert depth_one == 4 and full.valid.all()
    counts = count(features, full, 1).all.tolist()
    scales = loss_scales([1.0, 1.0], counts, counts)

    def grads(anchors: Anchors, factor: float) -> list[Tensor]:
        model.zero_grad()
        model(features, anchors, 1, Scales(*[[scales[0], scales[1] * factor]] * 2))[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = grads(full, 1.0)
    each = [grads(Anchors(full.places[:, i : i + 1], full.valid[:, i : i + 1]), depth_one) for i in range(depth_one)]
    assert_same(whole, [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)])


def test_anchors_are_drawn_by_row_not_by_batch() -> None:
    features = packed(TWO_ROWS, 14)
    together = choose_anchors(features, 2, ["a", "b"])
    alone = choose_anchors(rows(features, [1]), 2, ["b"])
    assert torch.equal(together.places[1][together.valid[1]], alone.places[0][alone.valid[0]])
    every = torch.arange(14).expand(2, 14)
    possible = supervised(features.document_ids, features.turn_ids, every, 1)
    assert together.valid.sum() == 4 and all(
        possible[r, p] for r, p in zip([0, 0, 1, 1], together.places.flatten(), strict=True)
    )


@pytest.mark.parametrize("depth", [0, 2])
def test_bf16_is_close_to_fp32(depth: int) -> None:
    model, features = objective(), packed(TWO_ROWS, 14)
    anchors = all_anchors(features)
    ones = Scales([1.0] * (depth + 1), [1.0] * (depth + 1))
    exact = model(features, anchors, depth, ones)[0]
    model.dtype = torch.bfloat16
    rounded, sums = model(features, anchors, depth, ones)
    total = PredictionStats(*sums.sum(0))
    assert rounded.item() == pytest.approx(
        (0.7 * total.cross_entropy + 0.4 * total.rejection + 0.6 * total.bonus).item(), rel=1e-6
    ), "summed in fp32"
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05) and rounded.item() != exact.item()


def test_a_depth_without_predictions_has_no_figures() -> None:
    sums = torch.arange(14.0).view(2, 7)
    values = step_values(sums, [4.0, 0.0])
    assert values == {
        "cross_entropy": [0.0, None],
        "acceptance": [1 - 1 / 4, None],
        "accuracy": [2 / 4, None],
        "teacher_mass_missing": [5 / 4, None],
        "bonus": [6 / 4, None],
    }
