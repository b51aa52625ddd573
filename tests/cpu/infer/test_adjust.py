"""Bias and penalties against their plain twin, by hand, and in a drafter's vocabulary."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.sampling import reference
from infer.kernels.sampling.adjust import Text, adjust_logits
from infer.kernels.sampling.params import Sampling

TEXT = Text(prompt=[1, 4, 4, 7], answer=[2, 7, 2])
PATHS = [[], [3], [3, 2], [3, 2, 2]]
SETTINGS = [
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=-0.3),
    Sampling(repetition_penalty=1.4),
    Sampling(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.25),
    Sampling(logit_bias=((0, 5.0), (9, -100.0))),
    Sampling(logit_bias=((2, 1.0), (11, -2.0)), repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.1),
]


def _logits(rows: int = len(PATHS), size: int = 13) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_adjusting_equals_its_plain_twin(sampling: Sampling) -> None:
    logits = _logits()
    before = logits.clone()
    got, expected = (
        adjust_logits(logits, sampling, TEXT, PATHS),
        reference.adjust_logits(logits, sampling, TEXT, PATHS),
    )
    assert not torch.equal(got, logits)
    torch.testing.assert_close(got, expected)
    assert torch.equal(logits, before)


def test_half_precision_is_adjusted_in_single() -> None:
    logits = _logits().bfloat16()
    got = adjust_logits(logits, SETTINGS[-1], TEXT, PATHS)
    torch.testing.assert_close(got, adjust_logits(logits.float(), SETTINGS[-1], TEXT, PATHS), rtol=0, atol=0)


def test_penalties_by_hand() -> None:
    """Prompt 0 0 1, answer 1, and the path 2: the repetition penalty sees 0, 1 and 2, the others only 1 and 2."""
    logits, text = torch.tensor([[2.0, 2.0, -2.0, 2.0]]), Text([0, 0, 1], [1])
    path = [[2, 1]]
    assert adjust_logits(logits, Sampling(repetition_penalty=2.0), text, path).tolist() == [[1.0, 1.0, -4.0, 2.0]]
    assert adjust_logits(logits, Sampling(presence_penalty=0.5), text, path).tolist() == [[2.0, 1.5, -2.5, 2.0]]
    assert adjust_logits(logits, Sampling(frequency_penalty=0.5), text, path).tolist() == [[2.0, 1.0, -2.5, 2.0]]
    assert adjust_logits(logits, Sampling(logit_bias=((3, -1.0),)), text, path).tolist() == [[2.0, 2.0, -2.0, 1.0]]
    both = Sampling(logit_bias=((3, -1.0), (2, 3.0)), repetition_penalty=2.0)
    assert adjust_logits(logits, both, text, path).tolist() == [[1.0, 1.0, 0.5, 1.0]]  # the bias comes first


def test_an_empty_text_is_not_penalised() -> None:
    logits = _logits(1)
    assert torch.equal(
        adjust_logits(logits, Sampling(presence_penalty=1.0, repetition_penalty=2.0), Text(), [[]]), logits
    )


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_in_a_drafters_vocabulary_each_token_keeps_its_penalty(sampling: Sampling) -> None:
    """Draft ids 0..5 stand for these target ids; tokens outside are passed over."""
    draft_to_target = torch.tensor([0, 2, 3, 7, 9, 12])
    target_to_draft = torch.full((13,), -1)
    target_to_draft[draft_to_target] = torch.arange(6)
    logits = _logits()
    got = adjust_logits(logits[:, draft_to_target], sampling, TEXT, PATHS, target_to_draft)
    torch.testing.assert_close(got, reference.adjust_logits(logits, sampling, TEXT, PATHS)[:, draft_to_target])
