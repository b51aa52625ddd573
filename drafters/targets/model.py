"""Loading a target's transformers model: whole or shared by several processes, plain or quantised."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from drafters.base.errors import UserError
from drafters.targets.support import OWN_ATTENTION, refusal


def load_config(spec: str, path: str) -> Any:
    """The config alone. Raises `UserError` where it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target {spec!r} could not be loaded from {path}: {error}") from error


def load_model(spec: str, path: str, dtype: torch.dtype, device: str, attention: str, shards: int) -> Any:
    """The frozen model, on `device`. With `shards` > 1 that many neighbouring processes hold a part each: every
    forward is a collective.

    A quantisation that the checkpoint's config names stays as it is, as far as the package for it is installed.
    Raises `UserError` where something is missing or does not fit together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    try:
        quantised = getattr(AutoConfig.from_pretrained(path), "quantization_config", None) is not None
        if shards > 1:
            options["distributed_config"] = _sharing(spec, shards, quantised)
        elif quantised:
            options["device_map"] = {"": device}  # such weights are made on their device, and do not move
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, KeyError) and error.args == (attention,):  # from a table of the model's own
            raise refusal(spec, AutoConfig.from_pretrained(path), OWN_ATTENTION) from error
        raise UserError(f"target {spec!r} could not be loaded from {path}: {error}") from error
    model.requires_grad_(False).eval()
    return model if shards > 1 or quantised else model.to(device)


def whole_weight(module: Any, spec: str, what: str) -> Tensor:
    """The weight of the head or the embeddings, unsharded (a collective). Raises `UserError` if quantised."""
    weight = whole(module.weight.detach())
    if not usable(weight):
        raise UserError(
            f"target {spec!r} has its {what} quantised ({weight.dtype}): use a quantisation that leaves it as it was"
        )
    return weight


def whole(tensor: Tensor) -> Tensor:
    """The full content of a sharded tensor (a collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def usable(weight: Tensor) -> bool:
    """Whether a weight is stored as plain floating point, not quantised."""
    return weight.is_floating_point() and weight.element_size() >= 2


def _sharing(spec: str, shards: int, quantised: bool) -> Any:
    """FSDP2 over `shards` neighbours; with more processes than that, each group of them holds the whole model."""
    from transformers.distributed.configuration_utils import DistributedConfig

    world = distributed.get_world_size() if distributed.is_initialized() else 1
    if world % shards:
        raise UserError(
            f"target {spec!r}: {world} processes cannot form groups of {shards}, start the same number on every node"
        )
    if quantised:
        raise UserError(
            f"target {spec!r} is quantised and cannot be sharded: use features.target=whole, or the unquantised target"
        )
    return DistributedConfig(fsdp_size=shards, dp_replicate_size=world // shards)
