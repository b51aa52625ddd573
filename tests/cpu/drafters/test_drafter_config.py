"""The drafter's config.json: round trip, both RoPE styles, both tap conventions, contradictions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig, default_taps, from_config_json, to_config_json
from drafters.eagle3_ssd.model import inverse_frequencies, rotary
from drafters.eagle3_ssd.rope import RopeScaling

CONFIG = DrafterConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    num_hidden_layers=4,
    rope_theta=100000.0,
    max_position_embeddings=8192,
    vocab_size=49152,
    draft_vocab_size=8192,
    target_hidden_size=576,
    tap_hidden_states_ids=default_taps(30),
)


LLAMA_3_1 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.8}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA_3_1},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "truncate": False}
    | MSCALES,
]
POSITIONS = torch.tensor([[0, 1, 17, 700, 9000]])


def written(**changes: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(to_config_json(CONFIG)))
    content.update(changes)
    return {name: value for name, value in content.items() if value is not None}


def test_round_trip() -> None:
    assert from_config_json(written(), "here") == CONFIG


def test_taps_in_both_conventions() -> None:
    content = written()
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    only_outputs = written(eagle_aux_hidden_state_layer_ids=None)
    assert from_config_json(only_outputs, "here").tap_hidden_states_ids == (2, 15, 27)
    with pytest.raises(UserError, match="disagrees"):
        from_config_json(written(eagle_aux_hidden_state_layer_ids=[1, 14, 26]), "here")


@pytest.mark.parametrize("style", ["old", "new", "both"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling and scaling["rope_type"])
def test_frequencies_rebuilt_from_the_file_equal_the_trained_ones(
    scaling: dict[str, Any] | None, style: str, tmp_path: Path
) -> None:
    trained = CONFIG.model_copy(update={"rope_scaling": scaling and RopeScaling(**scaling)})
    left_out = {"old": ["rope_parameters"], "new": ["rope_theta", "rope_scaling"], "both": []}[style]
    content = {name: value for name, value in to_config_json(trained).items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    read = from_config_json(json.loads((tmp_path / "config.json").read_text()), "here")
    for config in (trained, read):
        assert torch.equal(inverse_frequencies(config.rope, torch.device("cpu")), theirs.inv_freq)  # type: ignore[arg-type]
        assert config.rope.attention_factor == theirs.attention_scaling
    table, (cos, sin) = rotary(POSITIONS, read.rope), theirs(torch.zeros(1), POSITIONS)
    torch.testing.assert_close(tuple(table), (cos, sin), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 drafter"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"rope_theta": 10000.0}, "stated twice"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 100000.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_scaling: factor: Field required"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_parameters": None},
            "'llama3' needs low_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters disagree"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [1]}}, "mrope_section: Extra inputs"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"draft_vocab_size": 50000}, "larger than vocab_size"),
        ({"num_key_value_heads": 2}, "multiple of"),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None},
            "eagle_aux_hidden_state_layer_ids is missing",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_config_json(written(**changes), "dir/config.json")
    assert "dir/config.json" in str(caught.value)


def test_default_taps_need_enough_layers() -> None:
    assert default_taps(32) == (2, 16, 29)
    with pytest.raises(UserError, match="4 layers"):
        default_taps(4)
