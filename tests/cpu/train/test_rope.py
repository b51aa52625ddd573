"""A new drafter turns as its target does: theta and scaling reach the drafter that trains, its file, and what is read back from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.render import Example
from drafters.eagle3_ssd.config import DrafterConfig, from_config_json, to_config_json
from drafters.eagle3_ssd.model import inverse_frequencies
from drafters.targets import load_target
from tests.tiny import tiny_model, tiny_tokenizer
from train.config import DrafterSettings
from train.initialise import start

CPU = torch.device("cpu")
LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
EXAMPLE = Example("one", [5, 6, 7, 8], [0, 0, 1, 1])


def drafter_of(folder: Path, rope_parameters: dict[str, Any]) -> tuple[Any, DrafterConfig, list[str]]:
    """A tiny target with this rotary embedding, the configuration of a drafter started for it, and the notes."""
    model = tiny_model()
    model.config.rope_parameters = {**rope_parameters, "rope_theta": 500000.0}
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    target = load_target(str(folder), "float32")
    first = start(DrafterSettings(init="random", draft_vocab_size=8), target, [EXAMPLE], seed=0, cache=folder)
    return target, first.drafter.config, first.notes


@pytest.mark.parametrize("rope_parameters", [{"rope_type": "default"}, LLAMA_3_1, YARN], ids=lambda rope: rope["rope_type"])
def test_the_drafters_rotary_embedding_is_the_targets(tmp_path: Path, rope_parameters: dict[str, Any]) -> None:
    target, config, _ = drafter_of(tmp_path, rope_parameters)
    turning = target.model.model.rotary_emb
    assert torch.equal(inverse_frequencies(config.rope, CPU), turning.inv_freq)
    assert config.rope.attention_factor == turning.attention_scaling
    assert from_config_json(to_config_json(config), "config.json") == config


def test_a_scaling_no_drafter_knows_is_said(tmp_path: Path) -> None:
    _, config, notes = drafter_of(tmp_path, {"rope_type": "dynamic", "factor": 2.0})
    assert config.rope_scaling is None and config.rope_theta == 500000.0
    assert any("'dynamic' is not supported" in note and "unscaled" in note for note in notes)
