"""The compiled rows of the head's losses against torch, in value and gradient, for bf16 and fp32 logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.ops.head_loss import cpu
from train.ops.head_loss.closed_form import of_logits
from train.ops.head_loss.terms import LossOptions, PredictionStats, Teacher

N, VOCAB, POSITIONS = 37, 203, 20  # neither is a multiple of a vector


def teacher_of(generator: torch.Generator, dtype: torch.dtype) -> Teacher:
    """Sharp and flat predictions, point masses, and argmaxes without a draft id."""
    full = (4 * torch.randn(POSITIONS, VOCAB + 50, generator=generator)).softmax(-1)
    full[:5] = torch.nn.functional.one_hot(torch.randint(0, VOCAB, (5,), generator=generator), VOCAB + 50).float()
    best = full.argmax(-1)
    return Teacher(full[:, :VOCAB].to(dtype).contiguous(), best.clamp(max=VOCAB - 1), best < VOCAB)


@pytest.mark.parametrize("options", [LossOptions(1.0, 0.0), LossOptions(0.0, 1.0), LossOptions(0.7, 0.4, fan_out=2)])
@pytest.mark.parametrize("has_bonus", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)]
)
@pytest.mark.parametrize("sharpness", [0.5, 5.0, 60.0])
def test_rows_equal_those_of_torch(
    options: LossOptions, has_bonus: bool, dtypes: tuple[torch.dtype, torch.dtype], sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = teacher_of(generator, dtypes[1])
    logits = (sharpness * torch.randn(N, VOCAB, generator=generator)).to(dtypes[0])
    rows = torch.randint(0, POSITIONS, (N,), generator=generator)
    logits[torch.arange(0, N, 2), teacher.best[rows[::2]]] += 3 * sharpness  # half of them agree, or nearly
    base, bonus = torch.rand(2, N, generator=generator)
    chunk = Teacher(teacher.probs[rows].float(), teacher.best[rows], teacher.inside[rows])
    stats, grad = of_logits(logits.float(), chunk, base, bonus if has_bonus else None, options)

    found, own_grad = by_kernel(logits.clone(), teacher, rows, base, bonus if has_bonus else None, options)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtypes[0]]
    torch.testing.assert_close(found, stats, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(own_grad.float(), grad, rtol=4 * rounding, atol=rounding)
    columns = PredictionStats(*stats.unbind(1))
    assert 0 < columns.correct.sum() < N and columns.found.sum() > 0 and (columns.bonus > 0).any() == has_bonus


def by_kernel(
    logits: Tensor, teacher: Teacher, rows: Tensor, base: Tensor, bonus: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor]:
    assert cpu.available(logits, teacher.probs)
    return cpu.of_logits(logits, teacher, rows, base, bonus, options), logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_rounded_once(dtype: torch.dtype) -> None:
    """As torch rounds them, but for ties that the compiled exponential's last bit decides; the smallest are subnormal
    in fp16.
    """
    logits = (6 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))).to(dtype)
    normaliser = logits.float().logsumexp(-1) + 0.1
    found, plain = torch.empty(logits.shape, dtype=torch.float16), (logits.float() - normaliser[:, None]).exp().half()
    cpu.probabilities(logits, normaliser, found)
    assert (plain < 6e-5).any() and (plain > 0.1).any()
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=6e-8)
    assert (found == plain).double().mean() > 0.98


def test_a_top_with_nearly_all_the_mass_keeps_its_bonus_loss() -> None:
    """The others have e^-40 of it: a difference from 1 would be 0 in fp32."""
    logits = torch.tensor([[40.0, 0.0, 0.0, -1.0]])
    teacher = Teacher(torch.tensor([[0.1, 0.9, 0.0, 0.0]]), torch.tensor([1]), torch.tensor([True]))
    stats, grad = by_kernel(logits, teacher, torch.tensor([0]), torch.zeros(1), torch.ones(1), LossOptions(1.0, 0.0))
    rest = torch.tensor([0.0, 0.0, -1.0]).logsumexp(0)
    assert stats[0, 6].item() == pytest.approx(rest.item(), rel=1e-5)
    expected = torch.tensor([0.0, *torch.tensor([0.0, 0.0, -1.0]).softmax(0)]) - torch.tensor([0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(grad[0], expected, rtol=1e-5, atol=1e-6)


def test_a_logit_that_is_no_number_stays_visible() -> None:
    logits = torch.tensor([[1.0, torch.nan, 0.0, 2.0]])
    teacher = Teacher(torch.tensor([[0.1, 0.8, 0.1, 0.0]]), torch.tensor([1]), torch.tensor([True]))
    stats, grad = by_kernel(logits, teacher, torch.tensor([0]), torch.ones(1), None, LossOptions(1.0, 0.0))
    assert stats[0, 0].isnan() and grad.isnan().any()
