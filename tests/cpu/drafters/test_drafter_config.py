"""The drafter's config.json: round trip, both RoPE styles, both tap conventions, contradictions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.eagle3_ssd.config import DrafterConfig, default_taps, from_config_json, to_config_json
from drafters.eagle3_ssd.model import inverse_frequencies
from drafters.errors import UserError

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


@pytest.mark.parametrize("dropped", ["rope_theta", "rope_parameters", None])
def test_frequencies_rebuilt_from_the_file_equal_the_trained_ones(dropped: str | None, tmp_path: Path) -> None:
    content = written(**({dropped: None} if dropped else {}))
    mine = from_config_json(content, "here")
    ours = inverse_frequencies(mine.head_dim, mine.rope_theta, torch.device("cpu"))
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path)).inv_freq
    assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 drafter"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"rope_theta": 10000.0}, "stated twice"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 100000.0}}, "'llama3' is not supported"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "'linear' is not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"draft_vocab_size": 50000}, "larger than vocab_size"),
        ({"num_key_value_heads": 2}, "multiple of"),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, "eagle_aux_hidden_state_layer_ids is missing"),
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
