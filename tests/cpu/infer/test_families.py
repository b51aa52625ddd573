"""Families of targets: equal to transformers in every mode, or refused by the field that is the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base.errors import UserError
from drafters.targets.families import (
    CLOSE,
    Verdict,
    families,
    our_logits,
    plain_greedy,
    plain_model,
    prompts,
    row_of,
    save_tiny,
)
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from tests.tiny import save_tiny_drafter
from tests.trained import run

NEW = 12
EQUAL = [
    "granite",
    "cohere",
    "phi",
    "gpt2",
    "opt",
    "gptj",
    "stablelm",
    "nemotron",
    "minicpm3",
    "gpt_bigcode",
    "deepseek_v3",
    "nanochat",
]
REFUSED = {
    "mistral": "sliding_window = 4096",
    "qwen2, use_sliding_window": "layer_types = ['sliding_attention']",
    "gemma2, layer_types full_attention": "attn_logit_softcapping = 50.0",
    "bamba": "layer_types = ['linear_attention']",
    "doge": "keep_window_size = 2048",
    "bloom": "model_type = 'bloom'",
    "mpt": "model_type = 'mpt'",
    "bart": "model_type = 'bart'",
    "diffllama": "model_type = 'diffllama'",
    "bert": "model_type = 'bert'",
}


def answers(target: Target, drafter: Path, mode: Mode) -> list[list[int]]:
    devices: Any = {"target_devices": ("cpu",), "draft_devices": ("cpu",)}
    settings = EngineSettings(
        target="", drafter=str(drafter), dtype="float32", lookahead=3, budget=16, max_model_len=96, **devices
    )
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    return [request.new_tokens for request in run(settings, mode, target, prompts(), params)]


def check(family: str, directory: Path) -> None:
    """Logits are those of transformers' own forward, and what its forwards choose is what each mode answers."""
    place = save_tiny(family, directory / "target")
    plain, target = plain_model(place), load_target(str(place), "float32")
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor(prompts()[:1]), use_cache=False).logits[0]
    torch.testing.assert_close(our_logits(target, prompts()[0]), logits, rtol=0, atol=CLOSE)
    drafter = save_tiny_drafter(directory / "tiny-eagle3", target)
    expected = [plain_greedy(plain, prompt, NEW) for prompt in prompts()]
    for mode in Mode:
        assert answers(target, drafter, mode) == expected, mode


@pytest.mark.parametrize("family", EQUAL)
def test_a_family_is_what_transformers_computes(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_its_field(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be served: ") as refused:
        load_target(str(save_tiny(family, tmp_path)), "float32")
    assert REFUSED[family] in str(refused.value)
    assert "take a target" in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("family", families())
def test_every_family_is_equal_or_refused(family: str, tmp_path: Path) -> None:
    row = row_of(family)
    assert row.verdict is not Verdict.DIFFERS, row
    if row.verdict is Verdict.NO_CONFIG:
        pytest.skip(row.about)
    if row.verdict is Verdict.EQUAL:
        check(family, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_head_is_loaded_the_same_in_every_dtype(dtype: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny("granite", tmp_path)), dtype)
    assert target.head.law.scale == 1 / 8 and target.head.law.softcap is None
    hidden = torch.randn(3, 32).to(target.embed_weight)
    torch.testing.assert_close(target.head(hidden), hidden @ target.lm_head_weight.T / 8)
