"""Sizes of the KV pools: from the settings, or from the memory that is free."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.targets.identity import TargetFacts
from drafters.targets.target import DTYPES
from infer.config import EngineSettings
from infer.devices import device_of
from infer.draft.settings import DraftSettings
from infer.engine.target import BLOCK

CACHE = 4  # pool size over what the running requests can fill; the rest is prefix cache
MOST = 0.9  # share of the free memory that the running requests alone may take
CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)  # version 2, version 1


class Pools(NamedTuple):
    """Sizes in tokens, and a report of them. `draft` is 0 in mode ar."""

    target: int
    draft: int
    report: str


def plan_pools(
    settings: EngineSettings, facts: TargetFacts, drafter: DrafterConfig | None, draft: DraftSettings | None
) -> Pools:
    """Size both pools: `kv_tokens` where it is given, else `memory_share` of what is free, and room for a full batch
    where that fits.

    Raises `UserError` where not even one block fits.
    """
    size = DTYPES[settings.dtype].itemsize
    target_bytes, draft_bytes = bytes_per_token(facts, drafter, size)
    device = device_of(settings.target_devices)
    shares_memory = drafter is not None and device_of(settings.draft_devices) == device
    needed, free = settings.batch_size * settings.max_model_len, free_bytes(device)
    scratch = settings.batch_size * (draft.scratch_tokens + 2 * BLOCK) if draft else 0
    each = target_bytes + (draft_bytes if shares_memory else 0)
    left = max(0.0, free - (scratch * draft_bytes if shares_memory else 0))
    tokens = settings.kv_tokens
    if tokens is None:
        tokens = max(min(CACHE * needed, settings.memory_share * left // each), min(needed, MOST * left // each))
        tokens = int(tokens) // BLOCK * BLOCK
    if tokens < BLOCK:
        raise UserError(
            f"{_size(free)} of memory is free on {device}: too little for a KV pool; "
            "free some, or use a smaller target"
        )
    tokens = -(-tokens // BLOCK) * BLOCK
    draft_tokens = max(tokens, needed) + scratch if draft else 0
    sizes = tokens * target_bytes, draft_tokens * draft_bytes
    report = _report(settings, tokens, sizes[0], draft_tokens, sizes[1], free)
    return Pools(tokens, draft_tokens, report)


def bytes_per_token(facts: TargetFacts, drafter: DrafterConfig | None, size: int) -> tuple[int, int]:
    """Bytes per token of the target's pool (keys and values of all layers, and the fused feature) and of the
    drafter's; `size` bytes per number.
    """
    target = facts.num_hidden_layers * facts.kv.heads * (facts.kv.key_dim + facts.kv.value_dim) * size
    if drafter is None:
        return target, 0
    return (
        target + drafter.hidden_size * size,
        2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim * size,
    )


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; of a CPU what the system and the control group leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in CGROUPS:
        files = [Path("/sys/fs/cgroup") / name for name in (limit, used)]
        if all(file.is_file() for file in files) and (most := files[0].read_text().strip()) != "max":
            free = min(free, max(0, int(most) - int(files[1].read_text())))
    return free


def _report(settings: EngineSettings, tokens: int, size: int, draft: int, draft_size: int, free: int) -> str:
    source = "kv_tokens" if settings.kv_tokens is not None else f"memory_share {settings.memory_share:g}"
    text = f"KV pool: {tokens} tokens, {_size(size)} ({source}; {_size(free)} was free)"
    if draft:
        text += f"; the drafter's: {draft} tokens, {_size(draft_size)}"
    needed = settings.batch_size * settings.max_model_len
    if tokens < needed:
        text += f". {settings.batch_size} requests of {settings.max_model_len} tokens do not fit together: "
        text += "the last may have to start over"
    return text


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
