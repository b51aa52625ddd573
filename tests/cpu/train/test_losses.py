"""Losses by hand, the fused loss against the plain ones, and the supervision rule by brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.losses import CHUNK, acceptance, depth_weights, head_losses, kl, loss_scales, supervised, teacher_probabilities


def test_losses_by_hand() -> None:
    logits = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]])
    teacher = torch.tensor([[0.2, 0.6, 0.1]])  # a tenth of the mass lies outside the draft vocabulary
    assert acceptance(logits, teacher).item() == pytest.approx(1 - (0.2 + 0.25 + 0.1))
    assert kl(logits, teacher).item() == pytest.approx(-(0.2 * math.log(0.5) + 0.6 * math.log(0.25) + 0.1 * math.log(0.25)))


def test_acceptance_never_renormalises_the_teacher() -> None:
    teacher = torch.tensor([[0.3, 0.3]])
    assert acceptance(torch.zeros(1, 2), teacher).item() == pytest.approx(0.4)


@pytest.mark.parametrize(("kl_weight", "acceptance_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
@pytest.mark.parametrize("sharpness", [0.2, 3.0, 30.0])
def test_fused_loss_equals_plain_losses_in_value_and_gradient(kl_weight: float, acceptance_weight: float, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    number, hidden_size, vocab = CHUNK + 37, 12, 50  # two chunks, the second one partly filled
    hidden = torch.randn(number, hidden_size, generator=generator).requires_grad_()
    head = (sharpness * torch.randn(vocab, hidden_size, generator=generator) / 3).requires_grad_()
    teacher = (0.9 * torch.randn(60, vocab, generator=generator).mul(3).softmax(-1)).half()
    rows = torch.randint(0, 60, (number,), generator=generator)

    fused = head_losses(hidden, head, teacher, rows, kl_weight, acceptance_weight)
    fused_grads = torch.autograd.grad(2.5 * fused.loss, (hidden, head))
    logits = hidden @ head.T
    each_kl, each_rejection = kl(logits, teacher[rows]), acceptance(logits, teacher[rows])
    plain = (kl_weight * each_kl + acceptance_weight * each_rejection).sum()
    plain_grads = torch.autograd.grad(2.5 * plain, (hidden, head))

    torch.testing.assert_close(fused.loss, plain, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(fused.kl, each_kl.sum(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(fused.rejection, each_rejection.sum(), rtol=1e-5, atol=1e-3)
    assert fused.correct.item() == (logits.argmax(-1) == teacher[rows].argmax(-1)).sum().item()
    for a, b in zip(fused_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_teacher_keeps_the_mass_it_has() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(300, 8, generator=generator), torch.randn(20, 8, generator=generator)
    full = hidden @ head.T
    inside = teacher_probabilities(hidden, head[5:15], full.logsumexp(-1))
    torch.testing.assert_close(inside.float(), full.softmax(-1)[:, 5:15], rtol=1e-3, atol=1e-6)


def by_the_rule(documents: list[int], turns: list[int], p: int, d: int) -> bool:
    """The specification's sentence, clause by clause."""
    token = p + 2 + d
    if token >= len(turns) or turns[token] == 0:
        return False  # the loss mask holds at the predicted token
    if documents[p] != documents[p + 1] or documents[p + 1] != documents[token]:
        return False  # one document
    same_turn = [i for i in range(len(turns)) if documents[i] == documents[token] and turns[i] == turns[token]]
    return same_turn[0] <= p + 1  # the turn's first assistant token is at or before p + 1


DOCUMENT = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3)  # (context, answer) lengths


@settings(max_examples=60, deadline=None)
@given(st.lists(DOCUMENT, min_size=1, max_size=3), st.integers(0, 3))
def test_supervision_rule_by_brute_force(layout: list[list[tuple[int, int]]], padding: int) -> None:
    documents, turns = [], []
    for number, document in enumerate(layout, start=1):
        for turn, (context, answer) in enumerate(document, start=1):
            documents += [number] * (context + answer)
            turns += [0] * context + [turn] * answer
    documents += [0] * padding
    turns += [0] * padding
    anchors = torch.arange(len(turns) - 1)[None]
    for d in range(6):
        found = supervised(torch.tensor([documents]), torch.tensor([turns]), anchors, d)[0].tolist()
        assert found == [by_the_rule(documents, turns, p, d) for p in range(len(turns) - 1)], (documents, turns, d)


def test_depth_weights() -> None:
    assert depth_weights("flat", 3, 0.5) == [1.0, 1.0, 1.0]
    assert depth_weights("decay", 3, 0.5) == [1.0, 0.5, 0.25]


def test_a_sample_of_anchors_stands_for_all() -> None:
    # 10 and 6 supervised predictions, of which 10 and 2 were computed: each of the 2 counts three times
    assert loss_scales([1.0, 0.5], [10, 6], [10, 2]) == pytest.approx([1 / 16, 0.5 * 3 / 16])
    assert loss_scales([1.0, 1.0], [4, 0], [4, 0]) == [0.25, 0.0]
