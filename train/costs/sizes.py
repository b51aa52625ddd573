"""Sizes of target and drafter from configuration files alone, for planning: no weights, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig, default_taps, from_config_json
from drafters.targets.files import BUILTINS, MARKER, default_cache_dir
from train.config import TrainSettings

TARGET_CONFIG = "target-config.json"  # a copy of the target's config.json beside a recipe


class TargetSize(NamedTuple):
    """Of the target: its text config, its directory where it is on this machine, all its parameters, and those a token
    meets.

    A token is not multiplied with the embeddings, and in a mixture of experts only with those that it visits.
    """

    config: Any
    directory: Path | None
    parameters: int
    multiplied: int


def target_size(spec: str, recipe: Path) -> TargetSize:
    """The sizes of the target `spec`, by its own config.json or the copy in the recipe's folder."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    directory = _directory(spec)
    beside = recipe.parent / TARGET_CONFIG
    file = directory / "config.json" if directory else beside
    if not file.is_file():
        raise UserError(
            f"target {spec!r} is not on this machine and there is no {beside}: "
            "put the target's config.json there to plan"
        )
    try:
        config = AutoConfig.for_model(**json.loads(file.read_text(encoding="utf-8")))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} describes no causal language model that transformers knows: {error}") from error
    text = config.get_text_config()
    weights = dict(model.named_parameters())
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    visited = getattr(text, "num_experts_per_tok", 1) / experts if experts else 1.0
    multiplied = sum(weight.numel() * (visited if ".experts." in name else 1.0) for name, weight in weights.items())
    if not config.tie_word_embeddings:
        multiplied -= model.get_input_embeddings().weight.numel()
    return TargetSize(text, directory, sum(weight.numel() for weight in weights.values()), int(multiplied))


def drafter_config(settings: TrainSettings, target: Any) -> DrafterConfig:
    """The drafter that the settings ask for, with the sizes of the target (a transformers text config)."""
    chosen = settings.drafter
    if chosen.init not in ("target", "random"):
        file = Path(chosen.init) / "config.json"
        if not file.is_file():
            raise UserError(
                f"drafter.init = {chosen.init!r} has no config.json; give 'target', 'random' or a drafter's directory"
            )
        return from_config_json(json.loads(file.read_text(encoding="utf-8")), str(file))
    heads = target.num_attention_heads
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        num_hidden_layers=chosen.num_hidden_layers,
        rope_theta=10000.0,  # no size depends on it
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        draft_vocab_size=chosen.draft_vocab_size,
        target_hidden_size=target.hidden_size,
        fc_norm=chosen.fc_norm != "none",
        feature_norm=chosen.feature_norm != "none",
        norm_output=chosen.norm_output,
        tap_hidden_states_ids=chosen.tap_hidden_states_ids or default_taps(target.num_hidden_layers),
    )


def _directory(spec: str) -> Path | None:
    name = spec.removeprefix("builtin:")
    if name != spec and name in BUILTINS:
        place = default_cache_dir() / "targets" / f"{name}-{BUILTINS[name].version}"
        return place if (place / MARKER).is_file() else None
    return Path(spec) if (Path(spec) / "config.json").is_file() else None
