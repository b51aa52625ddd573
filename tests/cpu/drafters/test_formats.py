"""Other projects' layouts: written by the exporter, read by a plain reader of each engine's rules, same logits;
variants refused by name.

The readers below know nothing of this project. Each takes tensor names, tap convention, theta, scaling and embeddings
as its engine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.base.errors import UserError
from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.checkpoint import load_drafter, read_files, save_drafter, vocab_tensors, write_files
from drafters.eagle3_ssd.config import DrafterConfig, to_config_json
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.rope import RopeScaling
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.formats.foreign import read_foreign
from drafters.formats.layouts import (
    FIRST_LAYER,
    READERS,
    Format,
    TargetNumbers,
    emit_config,
    refuse_unrepresentable,
    rename_first_layer,
)

V, VD, HT, L, THETA = 40, 24, 12, 8, 5000.0
TARGET = TargetNumbers("some/target", ("LlamaForCausalLM",), L, THETA)
LLAMA3 = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=THETA,
    max_position_embeddings=64,
    vocab_size=V,
    draft_vocab_size=VD,
    target_hidden_size=HT,
    tap_hidden_states_ids=(2, 4, 5),
)
CARD = DrafterCard(
    target="some/target",
    target_weight_hash="weights",
    tokenizer_hash="tokens",
    template_hash="template",
    lookahead=3,
    trained_depth=8,
    trained_length=64,
)


def drafter_directory(folder: Path, **changes: Any) -> Path:
    """A random drafter of our own, with embeddings in its file."""
    torch.manual_seed(0)
    config = CONFIG.model_copy(update=changes)
    model = Eagle3Drafter(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5) if weight.dim() == 2 else weight.uniform_(0.5, 1.5)
    ids = torch.randperm(V)[:VD].sort().values
    return save_drafter(folder / "ours-eagle3", model, VocabMap(ids, V), CARD, with_embeddings=True)


def export(kind: Format, source: Path, out: Path) -> Path:
    files = read_files(source)
    refuse_unrepresentable(kind, files.config, TARGET)
    named = rename_first_layer({**files.tensors, **vocab_tensors(files.vocab)}, FIRST_LAYER, READERS[kind].first_layer)
    return write_files(out, named, emit_config(kind, files.config, "bfloat16", 3, TARGET), files.card)


class Layout(NamedTuple):
    """What one engine makes of a directory."""

    tensors: dict[str, Tensor]  # the first layer under "first."
    sizes: dict[str, Any]
    taps: list[int]  # indices into hidden_states


def default_inputs() -> list[int]:
    return [2, L // 2, L - 3]


def as_eagle(place: Path) -> Layout:
    """midlayer.*; one unscaled layer; always the default layers' inputs; with target_hidden_size stated, embeddings
    come from the file.
    """
    sizes = json.loads((place / "config.json").read_text())
    assert sizes.get("rope_scaling") is None and sizes["num_hidden_layers"] == 1 and "target_hidden_size" in sizes
    return Layout(first_layer(place, "midlayer."), sizes, default_inputs())


def as_sglang(place: Path) -> Layout:
    """midlayer.*; taps are the OUTPUTS of eagle_config's layers, and nowhere else."""
    sizes = json.loads((place / "config.json").read_text())
    assert (
        sizes["architectures"] == ["LlamaForCausalLMEagle3"] and sizes["eagle_config"]["use_aux_hidden_state"] is True
    )
    outputs = sizes["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return Layout(first_layer(place, "midlayer."), sizes, [layer + 1 for layer in outputs])


def as_vllm(place: Path) -> Layout:
    """midlayer.* or layers.N.*; taps are the INPUTS of the top level's layers."""
    sizes = json.loads((place / "config.json").read_text())
    assert (
        sizes["architectures"][0] in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
        and not sizes["norm_before_residual"]
    )
    return Layout(first_layer(place, "layers.0."), sizes, sizes["eagle_aux_hidden_state_layer_ids"])


def as_speculators(place: Path) -> Layout:
    """layers.N.*; sizes of the layer in transformer_layer_config; taps are inputs; the rest beside it."""
    content = json.loads((place / "config.json").read_text())
    assert content["speculators_model_type"] == "eagle3" and content["norm_before_residual"] is False
    spec = content["speculators_config"]
    assert spec["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert spec["proposal_methods"][0]["speculative_tokens"] == 3
    sizes = {**content["transformer_layer_config"], "target_hidden_size": content["target_hidden_size"]}
    return Layout(first_layer(place, "layers.0."), sizes, content["eagle_aux_hidden_state_layer_ids"])


def as_ssd(place: Path) -> Layout:
    """The directory's name holds "eagle"; midlayer.*; one layer; theta is the target's, scaling is dropped, default
    layers' inputs.
    """
    assert "eagle" in place.name
    sizes = json.loads((place / "config.json").read_text())
    assert sizes["num_hidden_layers"] == 1
    sizes |= {"rope_theta": THETA, "rope_scaling": None, "rope_parameters": None}
    return Layout(first_layer(place, "midlayer."), sizes, default_inputs())


ENGINES: dict[Format, Callable[[Path], Layout]] = {
    Format.EAGLE: as_eagle,
    Format.SGLANG: as_sglang,
    Format.VLLM: as_vllm,
    Format.SPECULATORS: as_speculators,
    Format.SSD: as_ssd,
}


def first_layer(place: Path, prefix: str) -> dict[str, Tensor]:
    tensors = load_file(place / "model.safetensors")
    assert any(name.startswith(prefix) for name in tensors), f"no {prefix}* among {sorted(tensors)}"
    return {
        ("first." + name.removeprefix(prefix) if name.startswith(prefix) else name): tensor
        for name, tensor in tensors.items()
    }


def plain_logits(layout: Layout, states: list[Tensor], tokens: Tensor) -> Tensor:
    """EAGLE-3's forward written out, over the whole vocabulary; two steps, the second fed with the first one's
    pre-norm output.
    """
    sizes, w = layout.sizes, {name: t.float() if t.is_floating_point() else t for name, t in layout.tensors.items()}
    known = LlamaConfig(
        **{name: value for name, value in sizes.items() if name not in ("architectures", "torch_dtype")}
    )
    turn = LlamaRotaryEmbedding(known)
    heads, groups, dim, eps = (
        sizes["num_attention_heads"],
        sizes["num_key_value_heads"],
        sizes["head_dim"],
        sizes["rms_norm_eps"],
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def attention(x: Tensor, layer: str, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, w[f"{layer}self_attn.{p}_proj.weight"]).unflatten(-1, (-1, dim)).transpose(0, 1) for p in "qkv"
        )
        q, k = (y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(heads // groups, 0) for y in (k, v))
        scores = (q @ k.mT / dim**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return F.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), w[f"{layer}self_attn.o_proj.weight"])

    def mlp(x: Tensor, layer: str) -> Tensor:
        x = norm(x, f"{layer}post_attention_layernorm.weight")
        gate, up, down = (w[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    embeds = w["embed_tokens.weight"][tokens]
    r = F.linear(torch.cat([states[tap] for tap in layout.taps], -1), w["fc.weight"])
    cos, sin = (table[0] for table in turn(embeds, torch.arange(40, 40 + len(tokens))[None]))
    for _ in range(2):
        both = torch.cat((norm(embeds, "first.input_layernorm.weight"), norm(r, "first.hidden_norm.weight")), -1)
        r = r + attention(both, "first.", cos, sin)
        r = r + mlp(r, "first.")
        for layer in range(1, sizes["num_hidden_layers"]):
            r = r + attention(norm(r, f"layers.{layer}.input_layernorm.weight"), f"layers.{layer}.", cos, sin)
            r = r + mlp(r, f"layers.{layer}.")
    whole = torch.full((len(tokens), V), -torch.inf)
    whole[:, torch.arange(len(w["d2t"])) + w["d2t"]] = F.linear(norm(r, "norm.weight"), w["lm_head.weight"])
    assert torch.equal(whole[0] > -torch.inf, w["t2d"]) and w["t2d"].dtype == torch.bool
    return whole


def our_logits(place: Path, states: list[Tensor], tokens: Tensor) -> Tensor:
    loaded = load_drafter(place)

    def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    with torch.no_grad():
        r = loaded.model.fuse(torch.cat([states[tap] for tap in loaded.config.tap_hidden_states_ids], -1))[None]
        for _ in range(2):
            r = loaded.model(loaded.model.embed(tokens)[None], r, torch.arange(40, 40 + len(tokens))[None], causal)
        whole = torch.full((len(tokens), V), -torch.inf)
        whole[:, loaded.vocab.draft_to_target] = loaded.model.logits(r)[0]
    return whole


CASES = [(kind, {}) for kind in Format]
CASES += [(kind, {"rope_scaling": LLAMA3}) for kind in (Format.SGLANG, Format.VLLM, Format.SPECULATORS)]
CASES += [(kind, {"num_hidden_layers": 3}) for kind in (Format.VLLM, Format.SPECULATORS)]
CASES += [(kind, {"tap_hidden_states_ids": (1, 3, 7)}) for kind in (Format.SGLANG, Format.VLLM, Format.SPECULATORS)]


@pytest.mark.parametrize(
    ("kind", "changes"), CASES, ids=lambda part: "-".join(part) if isinstance(part, dict) else part
)
def test_the_engine_reads_the_same_drafter(tmp_path: Path, kind: Format, changes: dict[str, Any]) -> None:
    ours = drafter_directory(tmp_path, **changes)
    theirs = export(kind, ours, tmp_path / "theirs-eagle3")
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(7, HT, generator=generator) for _ in range(L + 1)]
    tokens = torch.randint(0, V, (7,), generator=generator)
    want = our_logits(ours, states, tokens)
    torch.testing.assert_close(plain_logits(ENGINES[kind](theirs), states, tokens), want, rtol=1e-4, atol=1e-4)
    shifted = states[1:] + states[:1]
    assert not torch.allclose(plain_logits(ENGINES[kind](theirs), shifted, tokens), want, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "changes"), CASES, ids=lambda part: "-".join(part) if isinstance(part, dict) else part
)
def test_what_was_exported_comes_back_bit_for_bit(tmp_path: Path, kind: Format, changes: dict[str, Any]) -> None:
    ours = read_files(drafter_directory(tmp_path, **changes))
    back = read_foreign(export(kind, tmp_path / "ours-eagle3", tmp_path / "theirs-eagle3"), target_layers=L)
    assert back.config == ours.config and back.notes == []
    assert torch.equal(back.vocab.draft_to_target, ours.vocab.draft_to_target)
    assert back.tensors.keys() == ours.tensors.keys()
    assert all(torch.equal(back.tensors[name], ours.tensors[name]) for name in ours.tensors)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            Format.EAGLE,
            {"num_hidden_layers": 2},
            "num_hidden_layers = 2: EAGLE knows one layer; --to vllm, --to speculators",
        ),
        (Format.SGLANG, {"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        (Format.SSD, {"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        (Format.EAGLE, {"rope_scaling": LLAMA3}, "rope_scaling = llama3: EAGLE has no such scaling"),
        (Format.SSD, {"rope_scaling": LLAMA3}, "rope_scaling = llama3"),
        (
            Format.EAGLE,
            {"tap_hidden_states_ids": (1, 4, 5)},
            r"tap_hidden_states_ids = \[1, 4, 5\]: EAGLE taps \[2, 4, 5\]",
        ),
        (Format.SSD, {"tap_hidden_states_ids": (2, 4, 6)}, r"the SSD reference engine taps \[2, 4, 5\]"),
        (
            Format.SSD,
            {"rope_theta": 10000.0},
            "rope_theta = 10000: the SSD reference engine would use the target's, 5000",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(kind: Format, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_unrepresentable(kind, CONFIG.model_copy(update=changes), TARGET)


def test_the_ssd_engine_is_compared_with_a_target() -> None:
    with pytest.raises(UserError, match="--target is missing"):
        refuse_unrepresentable(Format.SSD, CONFIG, None)


def head(
    folder: Path,
    name: str = "model.safetensors",
    config: dict[str, Any] | None = None,
    head_dim: int = 8,
    **tensors: Tensor | None,
) -> Path:
    """A public one-layer head, with changes: None takes a key away, dots of tensor names are written as __."""
    files = read_files(drafter_directory(folder, head_dim=head_dim))
    content = {**to_config_json(files.config), "eagle_config": None, **(config or {})}
    whole: dict[str, Tensor | None] = {**files.tensors, **vocab_tensors(files.vocab)}
    whole |= {key.replace("__", "."): tensor for key, tensor in tensors.items()}
    kept = {key: tensor for key, tensor in whole.items() if tensor is not None}
    place = folder / "head"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    save_file(kept, place / name) if name.endswith(".safetensors") else torch.save(kept, place / name)
    return place


def test_eagles_bare_config_is_completed_and_the_assumptions_are_said(tmp_path: Path) -> None:
    """EAGLE's heads state neither taps, theta, head size nor the target's hidden size; the files are pickled."""
    unstated = ("head_dim", "rope_theta", "rope_parameters", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    place = head(
        tmp_path, "pytorch_model.bin", {**dict.fromkeys(unstated), "architectures": ["LlamaForCausalLM"]}, head_dim=4
    )
    found = read_foreign(place, target_layers=L)
    assert found.kind is Format.EAGLE
    assert found.config == CONFIG.model_copy(update={"rope_theta": 10000.0, "head_dim": 4})
    assert len(found.notes) == 1 and "no rope_theta: taken as 10000" in found.notes[0]
    with pytest.raises(UserError, match="names no taps.*--target-layers"):
        read_foreign(place)
    assert read_foreign(place, taps=[1, 2, 3]).config.tap_hidden_states_ids == (1, 2, 3)


def test_a_head_over_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    place = head(tmp_path, config={"draft_vocab_size": V}, d2t=None, t2d=None, lm_head__weight=torch.randn(V, 16))
    found = read_foreign(place)
    assert found.vocab.draft_to_target.tolist() == list(range(V))
    assert found.notes == ["no d2t, and the head covers the whole vocabulary: draft ids are target ids"]


def test_names_with_a_model_prefix_and_a_missing_t2d_are_read(tmp_path: Path) -> None:
    place = head(tmp_path, t2d=None)
    tensors = load_file(place / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, place / "model.safetensors")
    assert torch.equal(read_foreign(place).vocab.draft_to_target - torch.arange(VD), tensors["d2t"])


def test_the_targets_own_parts_are_left_out_and_said(tmp_path: Path) -> None:
    found = read_foreign(head(tmp_path, verifier_norm__weight=torch.ones(12)))
    assert "verifier_norm.weight" not in found.tensors and found.notes == [
        "verifier_norm.weight is the target's own and was left out"
    ]


FREQUENCIES = 1.0 / THETA ** (torch.arange(0, 8, 2) / 8)


def test_stored_frequencies_have_to_be_the_configs(tmp_path: Path) -> None:
    name = "midlayer__self_attn__rotary_emb__inv_freq"
    assert read_foreign(head(tmp_path, **{name: FREQUENCIES})).config.rope_theta == THETA  # type: ignore[arg-type]
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="inv_freq' disagrees with the config's rotary embedding"):
        read_foreign(head(tmp_path / "other", **{name: 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual = True is not supported"),
        ({"fc_norm": True}, "'fc_norm.0.weight' is missing"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not supported"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc = True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state = false"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"architectures": ["MedusaModel"]}, r"architectures = \['MedusaModel'\]"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope' is not supported",
        ),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash'"),
        (
            {"speculators_model_type": "eagle3", "norm_before_residual": None},
            "norm_before_residual is missing, and its readers disagree",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "tap_hidden_states_ids"),
        ({"draft_vocab_size": 23}, r"'d2t' has shape \(24,\), config.json says \(23,\)"),
    ],
)
def test_variants_are_refused_by_their_config_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_foreign(head(tmp_path, config=changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc_norm__0__weight": torch.ones(12)}, r"norms of the taps \(fc_norm"),
        ({"input_norm__weight": torch.ones(36)}, "'input_norm.weight' is not supported"),
        (
            {"midlayer__self_attn__q_norm__weight": torch.ones(8)},
            "'midlayer.self_attn.q_norm.weight' is not supported",
        ),
        ({"fc__bias": torch.ones(16)}, r"'fc.bias' is not supported \(biases\)"),
        ({"mask_hidden": torch.ones(16)}, "'mask_hidden' is not supported"),
        (
            {"additional_layers__0__mlp__up_proj__weight": torch.ones(2, 2)},
            "'additional_layers.0.mlp.up_proj.weight' is unknown",
        ),
        ({"midlayer__hidden_norm__weight": None}, "'midlayer.hidden_norm.weight' is missing"),
        ({"lm_head__weight": None}, "'lm_head.weight' is missing"),
        ({"fc__weight": torch.ones(16, 24)}, r"'fc.weight' has shape \(16, 24\)"),
        ({"d2t": None}, "'d2t' is missing"),
        ({"d2t": torch.arange(3, 27)}, "an index was stored where an offset belongs"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "'t2d' is missing or disagrees"),
    ],
)
def test_variants_are_refused_by_their_tensors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_foreign(head(tmp_path, **changes))


class Harmful:
    """Would write a file when unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.place,))


def test_a_pickle_that_holds_more_than_tensors_is_not_run(tmp_path: Path) -> None:
    place = head(tmp_path, "pytorch_model.bin")
    torch.save({"fc.weight": Harmful(tmp_path / "ran")}, place / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors, which is refused"):
        read_foreign(place)
    assert not (tmp_path / "ran").exists()
    (place / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is damaged"):
        read_foreign(place)
    (place / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="holds no .safetensors or .bin file"):
        read_foreign(place)


def test_an_eagle_3_1_head_comes_in_with_its_norms(tmp_path: Path) -> None:
    """`fc_norm` may stand at the top or in `eagle_config`; the norms of the taps are read, not started anew."""
    norms: dict[str, Any] = {f"fc_norm__{i}__weight": torch.full((12,), float(i + 2)) for i in range(3)}
    read = read_foreign(head(tmp_path, config={"eagle_config": {"fc_norm": True}, "norm_output": True}, **norms))
    assert (read.config.fc_norm, read.config.norm_output, read.config.feature_norm) == (True, True, False)
    assert [read.tensors[f"fc_norm.{i}.weight"][0].item() for i in range(3)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", list(Format))
def test_an_export_refuses_norms_that_its_reader_would_drop(kind: Format) -> None:
    refuse_unrepresentable(kind, CONFIG, TARGET)
    assert not {"fc_norm", "feature_norm", "norm_output"} & emit_config(kind, CONFIG, "bfloat16", 4, TARGET).keys()
    for name in ("fc_norm", "norm_output", "feature_norm"):
        config = CONFIG.model_copy(update={name: True})
        if kind is Format.VLLM and name != "feature_norm":
            refuse_unrepresentable(kind, config, TARGET)
            assert emit_config(kind, config, "bfloat16", 4, TARGET)[name] is True
            continue
        with pytest.raises(UserError, match=f"{name} = true: .* does not apply this norm"):
            refuse_unrepresentable(kind, config, TARGET)
