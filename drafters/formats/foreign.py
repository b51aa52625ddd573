"""Import of EAGLE-3 heads from other projects: EAGLE, SpecForge (SGLang), plain vLLM and speculators.

A head with a part that this project does not have is refused, by the name of the key; nothing is dropped silently
(drafters/eagle3_ssd/README.md, section 3).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.base.errors import UserError
from drafters.eagle3_ssd.checkpoint import check_tensors, read_config_json, take_vocab
from drafters.eagle3_ssd.config import DrafterConfig, default_taps, taps_from_json
from drafters.eagle3_ssd.model import inverse_frequencies
from drafters.eagle3_ssd.rope import scaling_from_json, theta_from_json
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.formats.layouts import EXTRA_NORMS, FIRST_LAYER, SPECULATORS_TYPE, TAPS, Format, rename_first_layer

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
THETA_UNSTATED = 10000.0  # what EAGLE's code and transformers take where a config says nothing
EPS_UNSTATED = 1e-6

# Config switches of variants that are not supported. False, null and absent are fine.
SWITCHES = {
    "norm_before_residual": "the residual stream starts from the normed feature",
    "norm_before_fc": "a norm of the concatenated taps (EAGLE-3.1's input_norm)",
    "input_norm": "a norm of the concatenated taps (EAGLE-3.1)",
    "attention_bias": "biases",
    "mlp_bias": "biases",
    "qkv_bias": "biases",
    "bias": "biases",
    "use_sliding_window": "sliding-window attention",
    "tie_word_embeddings": "a head tied to the embeddings",
    "quantization_config": "quantised weights",
}
# Parts of tensor names that belong to such variants.
PARTS = {
    "input_norm": "a norm of the concatenated taps (EAGLE-3.1)",
    "q_norm": "norms of queries and keys",
    "k_norm": "norms of queries and keys",
    ".bias": "biases",
    "mask_hidden": "parallel drafting",
    "_scale": "quantised weights",
    "experts": "a mixture of experts",
}
VERIFIER_PARTS = (
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)  # the target's own, kept by speculators for training


class ForeignDrafter(NamedTuple):
    """A head under canonical tensor names, in the dtype it was stored in; `notes` are lines for the user."""

    kind: Format
    config: DrafterConfig
    vocab: VocabMap
    tensors: dict[str, Tensor]
    notes: list[str]


def read_foreign(place: Path, taps: Sequence[int] | None = None, target_layers: int | None = None) -> ForeignDrafter:
    """Read a head in any of the known formats.

    `taps` (indices into `hidden_states`) replace what the config says; `target_layers` is needed for the default taps
    of a config that says nothing.
    """
    where = str(place / "config.json")
    stated = read_config_json(place)
    content = _flat(stated, where)
    _refuse_variants(content, where)
    tensors = {name.removeprefix("model."): tensor for name, tensor in _read_weights(place).items()}
    counts_from_zero = any(name.startswith("layers.0.") for name in tensors)
    if counts_from_zero:
        tensors = rename_first_layer(tensors, "layers.0.", FIRST_LAYER)
    _refuse_parts(tensors, place)
    notes: list[str] = []
    config = _config(content, tensors, where, _taps(content, taps, target_layers, where), notes)
    _leave_out(tensors, config, place, notes)
    vocab = _vocab(tensors, config, place, notes)
    check_tensors(config, tensors, place)
    return ForeignDrafter(_kind(stated, counts_from_zero), config, vocab, tensors, notes)


def _kind(stated: Mapping[str, Any], counts_from_zero: bool) -> Format:
    if SPECULATORS_TYPE in stated:
        return Format.SPECULATORS
    if counts_from_zero:
        return Format.VLLM
    return Format.SGLANG if TAPS in (stated.get("eagle_config") or {}) else Format.EAGLE


def _flat(stated: dict[str, Any], where: str) -> dict[str, Any]:
    """One level of keys, whether the layer's sizes stand at the top or in `transformer_layer_config`."""
    if SPECULATORS_TYPE not in stated:
        return stated
    if stated[SPECULATORS_TYPE] != "eagle3":
        raise UserError(f"{where}: {SPECULATORS_TYPE} = {stated[SPECULATORS_TYPE]!r}; only 'eagle3' is supported")
    if "norm_before_residual" not in stated:  # speculators reads false, vLLM reads true
        raise UserError(
            f"{where}: norm_before_residual is missing, and its readers disagree on the default; write false or true"
        )
    return {
        **stated.get("transformer_layer_config", {}),
        **{name: value for name, value in stated.items() if value is not None},
    }


def _refuse_variants(content: Mapping[str, Any], where: str) -> None:
    architectures = content.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise UserError(f"{where}: architectures = {architectures!r}; EAGLE-3 heads say {' or '.join(ARCHITECTURES)}")
    eagle_config = content.get("eagle_config") or {}
    for name, meaning in SWITCHES.items():
        for part, path in ((content, name), (eagle_config, f"eagle_config.{name}")):
            if part.get(name):
                raise UserError(f"{where}: {path} = {part[name]!r} is not supported ({meaning})")
    if eagle_config.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{where}: eagle_config.use_aux_hidden_state = false is not supported (EAGLE-1: one feature, no taps)"
        )
    if content.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act = {content['hidden_act']!r} is not supported; drafters use 'silu'")


def _refuse_parts(tensors: Mapping[str, Tensor], place: Path) -> None:
    for name in sorted(tensors):
        for part, meaning in PARTS.items():
            if part in name:
                raise UserError(f"{place}: tensor {name!r} is not supported ({meaning})")


def _read_weights(place: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, else of its pickled ones (tensors alone are unpickled)."""
    files = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
    if not files:
        raise UserError(f"{place} holds no .safetensors or .bin file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            found = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{file} is damaged or holds more than tensors, which is refused: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise UserError(f"{file} holds no plain table of tensors; save the head's state dict alone")
        if twice := sorted(found.keys() & tensors.keys()):
            raise UserError(f"{place}: tensor {twice[0]!r} stands in two files; keep one")
        tensors |= found
    return tensors


def _taps(
    content: Mapping[str, Any], given: Sequence[int] | None, target_layers: int | None, where: str
) -> tuple[int, ...]:
    if given is not None:
        return tuple(given)
    if TAPS in content or TAPS in (content.get("eagle_config") or {}):
        return taps_from_json(content, where)
    if target_layers is None:
        raise UserError(
            f"{where} names no taps ({TAPS}); give --target or --target-layers N for the default ones, or --taps A B C"
        )
    return default_taps(target_layers)


def _config(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str, taps: tuple[int, ...], notes: list[str]
) -> DrafterConfig:
    theta = theta_from_json(content, where, default=THETA_UNSTATED)
    if theta == THETA_UNSTATED and not any(content.get(key) for key in ("rope_theta", "rope_parameters")):
        notes.append(f"{where} states no rope_theta: taken as {THETA_UNSTATED:g}, as EAGLE and transformers do")
    for name in ("fc.weight", "lm_head.weight"):
        if name not in tensors:
            raise UserError(f"{where}: tensor {name!r} is missing beside it; this is no EAGLE-3 head")
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    derived = {
        "num_key_value_heads": heads,
        "head_dim": hidden // heads if hidden and heads else None,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS_UNSTATED,
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "target_hidden_size": tensors["fc.weight"].shape[1] // 3,
    }
    names = DrafterConfig.model_fields.keys() - {"rope_theta", "rope_scaling", "tap_hidden_states_ids", *EXTRA_NORMS}
    sizes = {name: derived.get(name) if content.get(name) is None else content[name] for name in names}
    scaling = scaling_from_json(content, where)
    switches: dict[str, Any] = {name: _switch(content, name) for name in EXTRA_NORMS}
    if "fc_norm.0.weight" in tensors and not switches["fc_norm"]:
        raise UserError(
            f"{where}: the weights hold norms of the taps (fc_norm.*), but fc_norm is not true; set it in the config"
        )
    try:
        sizes |= {"rope_theta": theta, "rope_scaling": scaling, "tap_hidden_states_ids": taps}
        return DrafterConfig.model_validate(sizes | switches)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "sizes"
        raise UserError(f"{where}: {name} = {first['input']!r}: {first['msg']}") from error


def _switch(content: Mapping[str, Any], name: str) -> bool:
    """A switch of an EAGLE-3.1 variant, at the top of the config or, as some trainers write it, in `eagle_config`."""
    return bool(content.get(name) or (content.get("eagle_config") or {}).get(name))


def _leave_out(tensors: dict[str, Tensor], config: DrafterConfig, place: Path, notes: list[str]) -> None:
    """Remove tensors that are no parameters of the head: the target's own, and rotary frequencies.

    Frequencies have to be those of the config; `UserError` otherwise.
    """
    frequencies = inverse_frequencies(config.rope, torch.device("cpu"))
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        stored = tensors.pop(name).float()
        if stored.shape != frequencies.shape or not torch.allclose(stored, frequencies, rtol=1e-2):
            raise UserError(
                f"{place}: tensor {name!r} disagrees with the config's rotary embedding; "
                "correct rope_theta or rope_scaling"
            )
    for name in VERIFIER_PARTS:
        if tensors.pop(name, None) is not None:
            notes.append(f"{name} is the target's own and was left out")


def _vocab(tensors: dict[str, Tensor], config: DrafterConfig, place: Path, notes: list[str]) -> VocabMap:
    """The draft vocabulary. Without `d2t` the head has to cover the whole vocabulary; a missing `t2d` is computed."""
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        notes.append("no d2t, and the head covers the whole vocabulary: draft ids are target ids")
    if "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = VocabMap.from_offsets(tensors["d2t"], config.vocab_size).t2d()
    return take_vocab(tensors, config, place)
