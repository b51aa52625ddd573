"""Drafter formats of other engines: what each can represent, and the `config.json` of an export (torch-free).

All of them hold EAGLE-3's tensors under nearly the same names. They differ in the first layer's prefix, in the layout
of the config, and in how tap layers are counted (drafters/eagle3_ssd/README.md, section 3). Variables called `inputs`
count the INPUT of target layer i (transformers' `hidden_states`), `outputs` its OUTPUT: one less for the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig, default_taps, to_config_json

FIRST_LAYER = "midlayer."  # the canonical prefix; vLLM and speculators count from layers.0
TAPS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_TYPE = "speculators_model_type"
EXTRA_NORMS = ("fc_norm", "feature_norm", "norm_output")
T = TypeVar("T")


class Format(StrEnum):
    """A layout that some engine reads."""

    EAGLE = "eagle"
    SGLANG = "sglang"
    VLLM = "vllm"
    SPECULATORS = "speculators"
    SSD = "ssd"


class Reader(NamedTuple):
    """What the engine that reads a format can represent."""

    engine: str
    first_layer: str
    several_layers: bool
    scaled_rope: bool
    norms: tuple[str, ...] = ()  # which of the config's extra norms it applies
    follows_target: bool = False  # takes theta from the target, whatever the drafter's config says
    default_taps: bool = False  # taps layers 2, L//2, L-3, whatever the config says


READERS = {
    Format.EAGLE: Reader("EAGLE", FIRST_LAYER, several_layers=False, scaled_rope=False, default_taps=True),
    Format.SGLANG: Reader("SGLang and SpecForge", FIRST_LAYER, several_layers=False, scaled_rope=True),
    Format.VLLM: Reader("vLLM", "layers.0.", several_layers=True, scaled_rope=True, norms=("fc_norm", "norm_output")),
    Format.SPECULATORS: Reader("speculators", "layers.0.", several_layers=True, scaled_rope=True),
    Format.SSD: Reader(
        "the SSD reference engine", FIRST_LAYER, False, False, (), follows_target=True, default_taps=True
    ),
}


class TargetNumbers(NamedTuple):
    """What an export has to know of the target, from its config alone."""

    name: str
    architectures: tuple[str, ...]
    num_hidden_layers: int
    rope_theta: float


def refuse_unrepresentable(kind: Format, config: DrafterConfig, target: TargetNumbers | None) -> None:
    """Raise `UserError` for the first setting that the format's engine would silently drop or read otherwise."""
    reader = READERS[kind]
    if config.num_hidden_layers > 1 and not reader.several_layers:
        others = ", ".join(f"--to {other}" for other in Format if READERS[other].several_layers)
        raise UserError(
            f"num_hidden_layers = {config.num_hidden_layers}: {reader.engine} knows one layer; {others} hold several"
        )
    if config.rope_scaling and not reader.scaled_rope:
        others = ", ".join(f"--to {other}" for other in Format if READERS[other].scaled_rope)
        raise UserError(
            f"rope_scaling = {config.rope_scaling.rope_type}: {reader.engine} has no such scaling for a drafter; "
            f"{others} have"
        )
    for name in EXTRA_NORMS:
        if getattr(config, name) and name not in reader.norms:
            others = ", ".join(f"--to {other}" for other in Format if name in READERS[other].norms)
            remedy = (
                f"; {others} applies it"
                if others
                else "; no other engine does, and without it the drafter accepts next to nothing"
            )
            raise UserError(f"{name} = true: {reader.engine} does not apply this norm{remedy}")
    if reader.follows_target and target is None:
        raise UserError(
            f"--target is missing: {reader.engine} takes rope_theta and the taps from the target, "
            "and they have to be compared"
        )
    taps = config.tap_hidden_states_ids
    wanted = default_taps(target.num_hidden_layers if target else taps[2] + 3)  # the last default tap is L - 3
    if reader.default_taps and taps != wanted:
        raise UserError(
            f"tap_hidden_states_ids = {list(taps)}: {reader.engine} taps {list(wanted)}, "
            "whatever a drafter's config says"
        )
    if reader.follows_target and target and config.rope_theta != target.rope_theta:
        theirs = f"{reader.engine} would use the target's, {target.rope_theta:g}"
        raise UserError(f"rope_theta = {config.rope_theta:g}: {theirs}; fine-tune the drafter with it")


def rename_first_layer(tensors: Mapping[str, T], old: str, new: str) -> dict[str, T]:
    """The same tensors, the first layer's under another prefix."""
    return {
        (new + name.removeprefix(old) if name.startswith(old) else name): tensor for name, tensor in tensors.items()
    }


def emit_config(
    kind: Format, config: DrafterConfig, dtype: str, lookahead: int, target: TargetNumbers | None
) -> dict[str, Any]:
    """The `config.json` of a drafter in another format.

    `lookahead` is the default number of speculative tokens, for formats that state one.
    """
    content = to_config_json(config, dtype)
    content = {name: value for name, value in content.items() if value or name not in EXTRA_NORMS}
    inputs = content.pop(TAPS)
    outputs = content.pop("eagle_config")
    if kind is Format.SPECULATORS:
        return _speculators_config(content, inputs, lookahead, target)
    if kind is Format.SGLANG:
        return {**content, "eagle_config": outputs}
    return {**content, TAPS: inputs, "eagle_config": {"use_aux_hidden_state": True}}


def _speculators_config(
    flat: dict[str, Any], inputs: Sequence[int], lookahead: int, target: TargetNumbers | None
) -> dict[str, Any]:
    """The drafter's layer in `transformer_layer_config`, everything else beside it."""
    beside = {
        name: flat.pop(name)
        for name in ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "torch_dtype")
    }
    del flat["architectures"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": lookahead,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        SPECULATORS_TYPE: "eagle3",
        **beside,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        TAPS: inputs,
        "transformer_layer_config": flat,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target and target.name,
                "architectures": list(target.architectures) if target else [],
            },
        },
    }
