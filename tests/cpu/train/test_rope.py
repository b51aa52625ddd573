"""A new drafter turns as its target does: theta and scaling reach the drafter that trains, its file, and the one that
serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from data.chat.render import Example
from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.checkpoint import load_drafter, save_drafter
from drafters.eagle3_ssd.config import DrafterConfig, from_config_json, to_config_json
from drafters.eagle3_ssd.model import inverse_frequencies
from drafters.eagle3_ssd.rope import RopeScaling
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.target import load_target
from infer.draft.model import DraftModel
from infer.kernels.attention.paged import PagedRequest
from tests.cpu.train.small import HIDDEN, small_config, small_drafter
from tests.tiny import tiny_model, tiny_tokenizer
from train.config import DrafterSettings
from train.trainer.initialise import start

CPU = torch.device("cpu")
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CARD = DrafterCard(
    target="t",
    target_weight_hash=None,
    tokenizer_hash=None,
    template_hash=None,
    lookahead=1,
    trained_depth=3,
    trained_length=64,
)
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


@pytest.mark.parametrize(
    "rope_parameters", [{"rope_type": "default"}, LLAMA_3_1, YARN], ids=lambda rope: rope["rope_type"]
)
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


@pytest.mark.parametrize("scaling", [None, LLAMA_3_1, YARN], ids=lambda rope: rope and rope["rope_type"])
def test_serving_turns_as_training_does(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    drafter = small_drafter(2)
    drafter.config = small_config(2).model_copy(update={"rope_scaling": scaling and RopeScaling(**scaling)})
    drafter.embed_tokens.weight.data.normal_()
    drafter.bfloat16().float()  # as the file holds it
    place = save_drafter(
        tmp_path / "small-eagle3", drafter, VocabMap(torch.arange(24), 40), CARD, with_embeddings=True
    )
    served = DraftModel(load_drafter(place), 32)
    tokens, features, places = [5, 9, 2, 7], torch.randn(4, HIDDEN), [20, 21, 22, 23]

    def causal(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    with torch.no_grad():
        want = drafter(drafter.embed(torch.tensor([tokens])), features[None], torch.tensor([places]), causal)[0]
        got = served.forward(tokens, features, places, [PagedRequest((0,), 4, 4)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    drafter.config = small_config(2).model_copy(update={"rope_theta": 7.0})
    with torch.no_grad():
        other = drafter(drafter.embed(torch.tensor([tokens])), features[None], torch.tensor([places]), causal)[0]
    assert not torch.allclose(other, want, atol=1e-2), "the test has to feel a change of frequencies"
