"""Training learns from the distribution the target has: scaled, soft-capped and biased heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.chat.pack import PackedRow
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.families import plain_model, prompts, save_tiny
from drafters.targets.head import HeadLaw, TargetHead, find_law
from drafters.targets.target import load_target
from train.config import DrafterSettings, TrainSettings
from train.costs.sizes import drafter_config
from train.ops.head_loss.op import teacher_probabilities
from train.target_features.features import compute_features
from train.trainer.initialise import take_over

DRAFT_IDS = torch.arange(3, 259, 4)


@pytest.mark.parametrize(
    "family", ["llama", "granite", "cohere", "minicpm3", "nanochat", "phi", "gemma2, no soft-capped scores"]
)
@torch.no_grad()
def test_the_teacher_is_the_targets_own_distribution(family: str, tmp_path: Path) -> None:
    place = save_tiny(family, tmp_path)
    target, prompt = load_target(str(place), "float32"), prompts()[0]
    own = plain_model(place)(input_ids=torch.tensor([prompt])).logits[0]
    ones = np.ones(len(prompt), dtype=np.int64)
    row = PackedRow(np.array(prompt), ones, ones, np.arange(len(prompt)))
    features = compute_features(target, [row], (2, 3, 4))
    torch.testing.assert_close(features.log_normaliser[0], own.logsumexp(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(features.argmax[0], own.argmax(-1))
    probs = teacher_probabilities(features.last_hidden[0], target.head.rows(DRAFT_IDS), features.log_normaliser[0])
    torch.testing.assert_close(probs.float(), own.softmax(-1)[:, DRAFT_IDS], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["granite", "phi", "gpt2", "gptj", "deepseek_v3"])
def test_a_drafter_starts_from_the_heads_scale_and_says_what_it_could_not_take(family: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(family, tmp_path)), "float32", fuse_layers=False)
    settings = DrafterSettings(draft_vocab_size=len(DRAFT_IDS))
    drafter = Eagle3Drafter(drafter_config(TrainSettings.model_construct(drafter=settings), target.model.config))
    notes = take_over(drafter, target, VocabMap(DRAFT_IDS, 259))
    assert torch.equal(drafter.lm_head.weight, target.lm_head_weight[DRAFT_IDS] * target.head.law.scale)
    assert any("starts at random" in note for note in notes) == (family != "granite"), notes


class Fields:
    """A config of these fields."""

    def __init__(self, **fields: float) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, float]:
        return self.fields


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({}, HeadLaw()),
        ({"logits_scaling": 8.0}, HeadLaw(1 / 8)),
        ({"logit_scale": 0.0625}, HeadLaw(0.0625)),
        ({"lm_head_multiplier": 0.5}, HeadLaw(0.5)),
        ({"dim_model_base": 8, "hidden_size": 32}, HeadLaw(0.25)),
        ({"final_logit_softcapping": 30.0}, HeadLaw(1.0, 30.0)),
        ({"final_logit_softcapping": 30.0, "logit_scale": 2.0}, HeadLaw(2.0, 30.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_law_is_found_by_what_it_does(fields: dict[str, float], law: HeadLaw, dtype: torch.dtype) -> None:
    plain = (20 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert find_law(Fields(**fields), plain, law.of(plain)) == law


def test_what_no_field_explains_is_no_law() -> None:
    plain = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    assert find_law(Fields(logit_scale=0.5), plain, plain * 0.7) is None
    assert find_law(Fields(), plain, plain[:, :40]) is None


def test_rows_of_a_head_are_columns_of_its_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*size, generator=generator) for size in ((50, 8), (50,), (3, 8)))
    head, ids = TargetHead(weight, bias, HeadLaw(0.5, 3.0)), torch.tensor([4, 7, 40])
    expected = 3.0 * (0.5 * (hidden @ weight.T + bias) / 3.0).tanh()
    torch.testing.assert_close(head(hidden), expected)
    torch.testing.assert_close(head.rows(ids)(hidden), expected[:, ids])
