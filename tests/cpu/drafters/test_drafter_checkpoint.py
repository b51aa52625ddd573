"""The canonical directory: strict in what it reads, whole after an interrupted write, refused by another target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.base.errors import UserError
from drafters.eagle3_ssd import checkpoint
from drafters.eagle3_ssd.card import CARD_FILE, DrafterCard, Measured, OutcomeLaw
from drafters.eagle3_ssd.checkpoint import load_drafter, save_drafter
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.vocab import VocabMap

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_hidden_layers=2,
    rope_theta=10000.0,
    max_position_embeddings=64,
    vocab_size=40,
    draft_vocab_size=24,
    target_hidden_size=12,
    tap_hidden_states_ids=(1, 2, 3),
)
CARD = DrafterCard(
    target="tiny",
    target_weight_hash="weights",
    tokenizer_hash="tokens",
    template_hash="template",
    lookahead=3,
    trained_depth=8,
    trained_length=64,
    law=OutcomeLaw(a=0.5, r=0.7, miss_rejected=0.6, miss_accepted=0.5),
    measured_fresh=Measured(reach=(0.5, 0.5), recall=((0.3,), (0.4,))),
)
EMBEDDINGS = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
FACTS: dict[str, Any] = {
    "name": "other",
    "weight_hash": "weights",
    "tokenizer_hash": "tokens",
    "template_hash": "template",
    "vocab_size": 40,
    "hidden_size": 12,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    vocab = VocabMap(torch.arange(3, 27), 40)
    return save_drafter(tmp_path / "small-eagle3", Eagle3Drafter(CONFIG), vocab, CARD)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the weights file by name (dots written as __); None removes one."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors")


def facts(**changes: Any) -> Any:
    return SimpleNamespace(**{**FACTS, **changes})


def test_round_trip_in_bf16_with_the_targets_embeddings(saved: Path) -> None:
    torch.manual_seed(0)
    model = Eagle3Drafter(CONFIG)
    loaded = load_drafter(saved, facts(), EMBEDDINGS)
    assert loaded.config == CONFIG and loaded.card == CARD and loaded.warnings == []
    assert loaded.vocab.draft_to_target.tolist() == list(range(3, 27))
    assert torch.equal(loaded.model.embed_tokens.weight, EMBEDDINGS)
    theirs = dict(loaded.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name != "embed_tokens.weight":
            assert torch.equal(theirs[name], parameter.to(torch.bfloat16).float()), name


def test_the_file_has_the_keys_and_shapes_of_eagle3(saved: Path) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in load_file(saved / "model.safetensors").items()}
    first = {name: shape for name, shape in shapes.items() if not name.startswith("layers.")}
    assert first == {
        "fc.weight": [16, 36],
        "midlayer.input_layernorm.weight": [16],
        "midlayer.hidden_norm.weight": [16],
        "midlayer.post_attention_layernorm.weight": [16],
        "midlayer.self_attn.q_proj.weight": [16, 32],
        "midlayer.self_attn.k_proj.weight": [8, 32],
        "midlayer.self_attn.v_proj.weight": [8, 32],
        "midlayer.self_attn.o_proj.weight": [16, 16],
        "midlayer.mlp.gate_proj.weight": [24, 16],
        "midlayer.mlp.up_proj.weight": [24, 16],
        "midlayer.mlp.down_proj.weight": [16, 24],
        "norm.weight": [16],
        "lm_head.weight": [24, 16],
        "d2t": [24],
        "t2d": [40],
    }
    assert shapes["layers.1.self_attn.q_proj.weight"] == [16, 16]


def test_embeddings_of_its_own_stay_with_a_drafter(saved: Path, tmp_path: Path) -> None:
    """A drafter may come with embeddings that are not the target's; fine-tuning it must not swap them for the
    target's.
    """
    assert not load_drafter(saved, embed_tokens=EMBEDDINGS).model.own_embeddings
    rewrite(saved, embed_tokens__weight=torch.full((40, 16), 0.5))
    loaded = load_drafter(saved, facts(), EMBEDDINGS)
    again = load_drafter(
        save_drafter(tmp_path / "again-eagle3", loaded.model, loaded.vocab, loaded.card), facts(), EMBEDDINGS
    )
    assert torch.equal(again.model.embed_tokens.weight, torch.full((40, 16), 0.5))


def test_embeddings_are_needed_from_somewhere(saved: Path) -> None:
    with pytest.raises(UserError, match="takes the target's embeddings"):
        load_drafter(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer__hidden_norm__weight": None}, "'midlayer.hidden_norm.weight' is missing"),
        ({"layers__1__mlp__up_proj__weight": None}, "'layers.1.mlp.up_proj.weight' is missing"),
        ({"fc_norm__weight": torch.ones(16)}, "'fc_norm.weight' is unknown"),
        ({"fc__weight": torch.ones(16, 24)}, r"'fc.weight' has shape \(16, 24\)"),
        ({"d2t": None}, "'d2t' is missing"),
        ({"d2t": torch.arange(3, 27)}, "index was stored where an offset belongs|disagrees"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "'t2d' is missing or disagrees"),
    ],
)
def test_every_tensor_is_checked_by_name(saved: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(saved, **changes)
    with pytest.raises(UserError, match=message):
        load_drafter(saved, embed_tokens=EMBEDDINGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_hash": "x"}, "tokenizer"),
        ({"vocab_size": 41}, "vocabulary size 40"),
        ({"hidden_size": 13}, "hidden size 12"),
    ],
)
def test_another_target_is_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter(saved, facts(**changes), EMBEDDINGS)


def test_other_weights_and_template_only_warn(saved: Path) -> None:
    warnings = load_drafter(saved, facts(weight_hash="x", template_hash="y"), EMBEDDINGS).warnings
    assert len(warnings) == 2 and "weights" in warnings[0] and "chat template" in warnings[1]


def test_an_interrupted_write_leaves_the_old_drafter(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_card", fail)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(saved, Eagle3Drafter(CONFIG), VocabMap(torch.arange(24), 40), CARD)
    assert (saved / "model.safetensors").read_bytes() == before
    load_drafter(saved, facts(), EMBEDDINGS)


def test_a_card_is_required_and_checked(saved: Path) -> None:
    content = json.loads((saved / CARD_FILE).read_text())
    (saved / CARD_FILE).write_text(json.dumps({**content, "lookahead": 0}))
    with pytest.raises(UserError, match="lookahead"):
        load_drafter(saved, embed_tokens=EMBEDDINGS)
    (saved / CARD_FILE).unlink()
    with pytest.raises(UserError, match=CARD_FILE):
        load_drafter(saved, embed_tokens=EMBEDDINGS)


def test_other_files_are_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: .*config\.json"):
        load_drafter(tmp_path)
