"""Losses by hand, the fused loss against the plain ones, and the supervision rule by brute force."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from drafters.targets.head import TargetHead
from tests.cpu.train.small import LargestTensor, ProductRows
from train.objective.supervision import loss_scales, pooled_scales, supervised
from train.ops.head_loss import reference
from train.ops.head_loss.closed_form import CHUNK
from train.ops.head_loss.cpu import ROWS
from train.ops.head_loss.op import head_losses, teacher_probabilities
from train.ops.head_loss.reference import bonus_greedy, bonus_sampled, soft_cross_entropy, total_variation
from train.ops.head_loss.terms import LossOptions, PredictionStats, Teacher
from train.ops.products import PADDED


def test_losses_by_hand() -> None:
    logits = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]])
    teacher = torch.tensor([[0.2, 0.6, 0.1]])  # a tenth of the mass lies outside the draft vocabulary
    assert total_variation(logits, teacher).item() == pytest.approx(1 - (0.2 + 0.25 + 0.1))
    assert soft_cross_entropy(logits, teacher).item() == pytest.approx(
        -(0.2 * math.log(0.5) + 0.6 * math.log(0.25) + 0.1 * math.log(0.25))
    )


@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_base_losses_equal_their_definitions_token_by_token(sharpness: float) -> None:
    hidden, head, teacher, rows, _, _ = case(40, sharpness)
    logits = (hidden @ head.T).detach().requires_grad_()
    slow_kl, slow_rejection = [], []
    for z, p in zip(logits, teacher.probs[rows].tolist(), strict=True):
        normaliser = sum((score.exp() for score in z), torch.zeros(()))
        q = [score.exp() / normaliser for score in z]
        slow_kl.append(sum((-p_t * q_t.log() for p_t, q_t in zip(p, q, strict=True)), torch.zeros(())))
        least = [q_t if q_t < p_t else torch.tensor(p_t, dtype=torch.float64) for p_t, q_t in zip(p, q, strict=True)]
        slow_rejection.append(1 - sum(least, torch.zeros(())))
    for fast, slow in (
        (soft_cross_entropy(logits, teacher.probs[rows]), slow_kl),
        (total_variation(logits, teacher.probs[rows]), slow_rejection),
    ):
        torch.testing.assert_close(fast, torch.stack(slow))
        grads = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (fast, torch.stack(slow))]
        torch.testing.assert_close(*grads)


def test_total_variation_never_renormalises_the_teacher() -> None:
    teacher = torch.tensor([[0.3, 0.3]])
    assert total_variation(torch.zeros(1, 2), teacher).item() == pytest.approx(0.4)


def plain_bonus(logits: Tensor, p: list[float], best: int | None, temperature: int) -> Tensor:
    """One prediction, token by token from the definition: mean over x of P(x drafted and rejected) * (- sum_t r(t) log
    q~(t)).
    """
    q = logits.softmax(-1).detach()
    tokens = range(len(p))
    total = torch.zeros((), dtype=logits.dtype)
    for x in tokens:
        if temperature == 0:  # the argmax is drafted, and rejected unless it is the target's
            drawn = float(x == int(logits.argmax()))
            rejected, residual = float(x != best), [float(t == best) for t in tokens]
            elsewhere = float(best is None)
        else:
            drawn = float(q[x])
            rejected, residual = max(0.0, 1 - p[x] / drawn), [max(0.0, p[t] - float(q[t])) for t in tokens]
            elsewhere = 1 - sum(p)
        if not drawn * rejected:
            continue
        mass = sum(residual) + elsewhere
        for t in tokens:
            if residual[t]:
                total = total - drawn * rejected * residual[t] / mass * (
                    logits[t] - logits[[i for i in tokens if i != x]].logsumexp(0)
                )
    return total


class Case(NamedTuple):
    """What the loss reads, in fp64; the sharpest teachers are point masses, some with their argmax outside the draft
    vocabulary.
    """

    hidden: Tensor
    head: Tensor
    teacher: Teacher
    rows: Tensor
    base: Tensor
    bonus: Tensor


def case(number: int, sharpness: float, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden_size, vocab, positions = 5, 9, 24
    hidden = torch.randn(number, hidden_size, generator=generator).double().requires_grad_()
    head = (sharpness * torch.randn(vocab, hidden_size, generator=generator)).double().requires_grad_()
    full = (
        torch.randn(positions, vocab + 3, generator=generator).double().mul(3).softmax(-1)
    )  # three tokens have no draft id
    full[:8] = F.one_hot(full[:8].argmax(-1), vocab + 3).double()
    best = full.argmax(-1)
    inside = best < vocab
    assert 0 < inside[:8].sum() < 8 and 0 < inside[8:].sum() < 16
    rows = torch.randint(0, positions, (number,), generator=generator)
    base, bonus = torch.rand(2, number, generator=generator).double()
    return Case(hidden, head, Teacher(full[:, :vocab], best.clamp(max=vocab - 1), inside), rows, base, bonus)


@pytest.mark.parametrize(
    "options", [LossOptions(1.0, 0.0, 0), LossOptions(0.0, 1.0, 1), LossOptions(0.7, 0.4, 0), LossOptions(0.7, 0.4, 1)]
)
@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_fused_losses_equal_plain_ones_in_value_and_gradient(options: LossOptions, sharpness: float) -> None:
    hidden, head, teacher, rows, base, bonus = case(CHUNK + 37, sharpness)  # two chunks, the second one partly filled
    fused = head_losses(hidden, head, teacher, rows, base, bonus, options)
    fused_grads = torch.autograd.grad(2.5 * fused.loss, (hidden, head))

    plain = reference.head_losses(hidden, head, teacher, rows, base, bonus, options)
    plain_grads = torch.autograd.grad(2.5 * plain.loss, (hidden, head))
    torch.testing.assert_close(fused.loss, plain.loss)
    torch.testing.assert_close(fused.stats_nC, plain.stats_nC)
    for a, b in zip(fused_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    stats = PredictionStats(*fused.stats_nC.unbind(1))
    logits, p = hidden @ head.T, teacher.probs[rows]
    best, inside = teacher.best[rows], teacher.inside[rows]
    each = bonus_sampled(logits, p) if options.bonus_temperature else bonus_greedy(logits, best, inside)
    base_loss = options.cross_entropy * soft_cross_entropy(logits, p) + options.total_variation * total_variation(
        logits, p
    )
    torch.testing.assert_close(plain.loss, base @ base_loss + bonus @ each)
    order = logits.argsort(-1, descending=True)
    agrees = (order == best[:, None]) & inside[:, None]
    torch.testing.assert_close(stats.cross_entropy, soft_cross_entropy(logits, p))
    torch.testing.assert_close(stats.rejection, total_variation(logits, p))
    torch.testing.assert_close(stats.bonus, each)
    torch.testing.assert_close(stats.missing, 1 - p.sum(-1))
    assert torch.equal(stats.correct, agrees[:, 0].double())
    assert torch.equal(stats.listed, agrees[:, :4].any(-1).double())
    assert torch.equal(stats.found, agrees[:, 1:5].any(-1).double())
    assert 0 < stats.found.sum() < (~agrees[:, 0]).sum()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_bonus_loss_equals_its_definition_token_by_token(temperature: int, sharpness: float) -> None:
    hidden, head, teacher, rows, _, _ = case(40, sharpness)
    logits = (hidden @ head.T).detach().requires_grad_()
    p, best, inside = teacher.probs[rows], teacher.best[rows], teacher.inside[rows]
    value = bonus_sampled(logits, p) if temperature else bonus_greedy(logits, best, inside)
    slow = torch.stack(
        [plain_bonus(logits[i], p[i].tolist(), int(best[i]) if inside[i] else None, temperature) for i in range(40)]
    )
    torch.testing.assert_close(value, slow)
    (grad,), (slow_grad,) = (torch.autograd.grad(v.sum(), logits, retain_graph=True) for v in (value, slow))
    torch.testing.assert_close(grad, slow_grad)
    if temperature == 0:
        assert bool((value[~inside] == 0).all()) and bool((grad[~inside] == 0).all()), (
            "what cannot be cached teaches nothing"
        )
        drafted = logits.argmax(-1)
        assert bool((grad.gather(-1, drafted[:, None]) == 0).all()), "the drafted token is neither raised nor lowered"
    assert bool((value > 0).any())


def test_bonus_loss_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    one = torch.tensor([True])
    # x = 0 is rejected for token 2: q~ = (-, 0.6, 0.4)
    assert bonus_greedy(logits, torch.tensor([2]), one).item() == pytest.approx(-math.log(0.4))
    assert bonus_greedy(logits, torch.tensor([0]), one).item() == 0
    # p = (0.1, 0.4, 0.3), 0.2 elsewhere: only x = 0 is ever rejected, with probability 0.5 - 0.1; r = (0, 1, 1) / 4,
    # half elsewhere
    teacher = torch.tensor([[0.1, 0.4, 0.3]])
    assert bonus_sampled(logits, teacher).item() == pytest.approx(
        -0.4 * 0.25 * (math.log(0.6) + math.log(0.4)), rel=1e-5
    )


def test_gradients_of_the_base_losses_are_those_of_finite_differences() -> None:
    hidden, head, teacher, rows, base, _ = case(12, 1.0)
    for options in (LossOptions(1.0, 0.0), LossOptions(0.3, 1.0)):
        assert torch.autograd.gradcheck(
            lambda h, w, options=options: head_losses(h, w, teacher, rows, base, None, options).loss, (hidden, head)
        )


def test_losses_stay_finite_where_the_drafter_is_certain() -> None:
    """fp32 logits 60 apart: 1 - q of the top is 1e-26, which `1 - q` would round to nothing."""
    head = torch.eye(4)
    hidden = torch.tensor([[60.0, 1.0, 0.0, -1.0], [60.0, 0.0, 0.0, 59.0]]).requires_grad_()
    teacher = Teacher(
        torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]), torch.tensor([1, 3]), torch.tensor([True, True])
    )
    ones = torch.ones(2)
    for temperature in (0, 1):
        loss = head_losses(
            hidden, head, teacher, torch.arange(2), 0 * ones, ones, LossOptions(1.0, 0.0, temperature)
        ).loss
        (grad,) = torch.autograd.grad(loss, hidden)
        plain = (
            bonus_sampled(hidden, teacher.probs) if temperature else bonus_greedy(hidden, teacher.best, teacher.inside)
        )
        (plain_grad,) = torch.autograd.grad(plain.sum(), hidden)
        torch.testing.assert_close(loss, plain.sum(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, plain_grad, rtol=1e-4, atol=1e-4)
        assert loss > 0.1


@pytest.mark.parametrize(("temperature", "at_once"), [(0, ROWS), (1, CHUNK)])
def test_no_tensor_of_all_predictions_times_the_vocabulary_is_ever_made(temperature: int, at_once: int) -> None:
    """Fault 9: the largest one is a chunk's, forward and backward, however many predictions there are."""
    number, hidden_size, vocab = 20 * at_once, 4, 64
    hidden, head = torch.randn(number, hidden_size).requires_grad_(), torch.randn(vocab, hidden_size).requires_grad_()
    teacher = Teacher(
        torch.rand(10, vocab).softmax(-1), torch.zeros(10, dtype=torch.int64), torch.ones(10, dtype=torch.bool)
    )
    ones = torch.ones(number)
    with LargestTensor() as largest:
        losses = head_losses(
            hidden,
            head,
            teacher,
            torch.zeros(number, dtype=torch.int64),
            ones,
            ones,
            LossOptions(1.0, 1.0, temperature),
        )
        losses.loss.backward()
    assert largest.numbers == max(at_once * vocab, number * len(PredictionStats._fields)) < number * vocab / 8


@pytest.mark.parametrize("options", [LossOptions(1.0, 1.0), LossOptions(1.0, 0.0, 1)])
def test_products_come_in_a_few_shapes_however_many_predictions_there_are(options: LossOptions) -> None:
    """Each new number of rows would be compiled, and what was compiled kept: memory would grow step by step."""
    for number in (1, 77, PADDED, PADDED + 1, ROWS + 13):
        c = case(number, 1.0)
        with ProductRows() as products:
            losses = head_losses(c.hidden, c.head, c.teacher, c.rows, c.base, c.bonus, options)
            losses.loss.backward()
            probs = teacher_probabilities(torch.randn(number, 4), TargetHead(torch.randn(8, 4)), torch.zeros(number))
        assert products.rows and all(rows % PADDED == 0 for rows in products.rows), (number, products.rows)
        assert len(losses.stats_nC) == len(probs) == number


def test_teacher_keeps_the_mass_it_has() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(300, 8, generator=generator), torch.randn(20, 8, generator=generator)
    full = hidden @ head.T
    inside = teacher_probabilities(hidden, TargetHead(head[5:15]), full.logsumexp(-1))
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


DOCUMENT = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3
)  # (context, answer) lengths


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
    mixed = supervised(torch.tensor([documents]), torch.tensor([turns]), anchors, anchors % 6)[0].tolist()
    assert mixed == [by_the_rule(documents, turns, p, p % 6) for p in range(len(turns) - 1)]


def test_a_sample_of_anchors_stands_for_all() -> None:
    # 10 and 6 supervised predictions, of which 10 and 2 were computed: each of the 2 counts three times
    assert loss_scales([1.0, 0.5], [10, 6], [10, 2]) == pytest.approx([1 / 16, 0.5 * 3 / 16])
    assert loss_scales([1.0, 1.0], [4, 0], [4, 0]) == [0.25, 0.0]


def test_replayed_depths_weigh_together_what_they_would_weigh_one_by_one() -> None:
    scales = pooled_scales([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [10, 6, 6], [10, 3, 1])
    assert scales == pytest.approx([1 / 22, 3 / 22, 3 / 22])
    tilted = pooled_scales([1.0, 0.5, 0.25], [1.0, 0.5, 0.25], [10, 6, 6], [10, 3, 1])
    assert tilted[1] == pytest.approx(2 * tilted[2]) and 3 * tilted[1] + tilted[2] == pytest.approx(
        (0.5 * 6 + 0.25 * 6) / 22
    )
    assert pooled_scales([1.0, 1.0], [1.0, 1.0], [4, 2], [4, 0]) == [pytest.approx(1 / 6), 0.0]
