"""Ranks, the process group and exchanges between processes, by accelerate."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch import distributed

PATIENCE = timedelta(hours=2)  # the first process measures and writes while the others wait


class Rank(NamedTuple):
    """This process among all, and among those of its node, as the launcher numbered them."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def rank() -> Rank:
    """Read from the environment: known before the process group exists."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    world = number("WORLD_SIZE", 1)
    return Rank(number("RANK", 0), world, number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", world))


def start_accelerator() -> Accelerator:
    """Start the process group in the way that accelerate's config names. Mixed precision is the recipe's `dtype`, not
    accelerate's.
    """
    on_cpu = not torch.cuda.is_available()
    handlers = [
        InitProcessGroupKwargs(timeout=PATIENCE),
        DistributedDataParallelKwargs(broadcast_buffers=False),  # the target's head does not change
    ]
    if not on_cpu:
        return Accelerator(mixed_precision="no", kwargs_handlers=handlers)
    return _on_cpu(handlers)


def _on_cpu(handlers: list[Any]) -> Accelerator:
    """accelerate turns DeepSpeed and FSDP on for GPUs only; both run on CPUs under gloo, so it is told afterwards."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = Accelerator(cpu=True, mixed_precision="no", kwargs_handlers=handlers)
    state: Any = accelerator.state
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("no")
        plugin.select(_from_accelerator_state=True)
        state.deepspeed_plugins, state.distributed_type = plugin, DistributedType.DEEPSPEED
    elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state.fsdp_plugin, state.distributed_type = FullyShardedDataParallelPlugin(), DistributedType.FSDP
    return accelerator


def gathered(value: Any) -> list[Any]:
    """Everybody's value, in the order of ranks, in all. Collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def agreed(value: Any) -> Any:
    """The first process's value, in all."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
