"""The loss of a batch: normalised by supervised predictions, so its gradient knows nothing of padding, batching or processes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.cpu.train import small
from tests.cpu.train.small import DRAFT_VOCAB, HIDDEN, TWO_ROWS, VOCAB, small_drafter
from train.config import LossSettings
from train.features import Features
from train.losses import Figures, acceptance, bonus_greedy, kl, loss_scales, supervised, teacher_probabilities
from train.objective import Anchors, Objective, Scales, choose_anchors, count
from train.unroll import Rows, unroll
from train.visits import depth_weights

DEPTH = 3
SETTINGS = LossSettings(kl=0.7, acceptance=0.4, bonus=0.6, gamma=0.8)
VOCABULARY = torch.tensor(sorted({*range(1, VOCAB, 2), 0, 10, 20, 30}))


def objective(layers: int = 2) -> Objective:
    drafter = small_drafter(layers)
    drafter.embed_tokens.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    head = torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    return Objective(drafter, head, VOCABULARY, SETTINGS, torch.float32)


def packed(layout: list[list[tuple[int, list[int]]]], length: int) -> Features:
    """Rows whose teacher has a tenth of its mass outside the draft vocabulary."""
    features = small.packed(layout, length)
    inside = (features.last_hidden @ objective().target_head.T).logsumexp(-1)
    return features._replace(log_normaliser=inside - math.log(0.9))


def gradient(model: Objective, batches: list[tuple[Features, Anchors]]) -> list[Tensor]:
    """As the loop does it: counts over all batches first, then one backward for each."""
    counts = [count(features, anchors, DEPTH) for features, anchors in batches]
    there_are = torch.stack([c.all for c in counts]).sum(0).tolist()
    computed = torch.stack([c.sampled for c in counts]).sum(0).tolist()
    scales = Scales(*(loss_scales(w, there_are, computed) for w in depth_weights(SETTINGS, DEPTH, ())))
    model.zero_grad()
    for features, anchors in batches:
        model(features, anchors, DEPTH, scales)[0].backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def rows(features: Features, chosen: list[int]) -> Features:
    return Features(*(tensor[chosen] for tensor in features))


def all_anchors(features: Features) -> Anchors:
    return choose_anchors(features, None, [""] * len(features.token_ids))


def same(a: list[Tensor], b: list[Tensor]) -> None:
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
            best = VOCABULARY.tolist().index(int(features.argmax[at])) if int(features.argmax[at]) in VOCABULARY else None
            cached = bonus_greedy(logits, torch.tensor([best or 0]), torch.tensor([best is not None]))
            want = want + 0.8**d * (0.7 * kl(logits, teacher) + 0.4 * acceptance(logits, teacher) + 0.6 * cached).sum()
            number_outside += best is None
            number += 1
    torch.testing.assert_close(loss, want / number, rtol=1e-5, atol=1e-6)
    assert number == counts.all.sum() and 0 < number_outside < number
    figures = Figures(*sums.sum(0))
    assert figures.missing.item() == pytest.approx(0.1 * number, rel=1e-2)
    assert 0 < figures.found <= number - number_outside - figures.correct


def test_gradient_does_not_depend_on_padding() -> None:
    model = objective()
    short = packed(TWO_ROWS, 14)
    more = 9
    longer = Features(*(torch.cat((x, torch.zeros(2, more, *x.shape[2:], dtype=x.dtype)), dim=1) for x in short))
    same(gradient(model, [(short, all_anchors(short))]), gradient(model, [(longer, all_anchors(longer))]))


def test_gradient_does_not_depend_on_micro_batching() -> None:
    model, features = objective(), packed(TWO_ROWS, 14)
    parts = [(rows(features, [row]), all_anchors(rows(features, [row]))) for row in (1, 0)]
    same(gradient(model, [(features, all_anchors(features))]), gradient(model, parts))


def test_sampled_anchors_are_unbiased() -> None:
    """One anchor a row, each in turn: the average gradient over all choices is the full one (each row has equally many)."""
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
    same(whole, [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)])


def test_anchors_are_drawn_by_row_not_by_batch() -> None:
    features = packed(TWO_ROWS, 14)
    together = choose_anchors(features, 2, ["a", "b"])
    alone = choose_anchors(rows(features, [1]), 2, ["b"])
    assert torch.equal(together.places[1][together.valid[1]], alone.places[0][alone.valid[0]])
    every = torch.arange(14).expand(2, 14)
    possible = supervised(features.document_ids, features.turn_ids, every, 1)
    assert together.valid.sum() == 4 and all(possible[r, p] for r, p in zip([0, 0, 1, 1], together.places.flatten(), strict=True))


@pytest.mark.parametrize("depth", [0, 2])
def test_bf16_is_close_to_fp32(depth: int) -> None:
    model, features = objective(), packed(TWO_ROWS, 14)
    anchors = all_anchors(features)
    ones = Scales([1.0] * (depth + 1), [1.0] * (depth + 1))
    exact = model(features, anchors, depth, ones)[0]
    model.dtype = torch.bfloat16
    rounded = model(features, anchors, depth, ones)[0]
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05) and rounded.item() != exact.item()
