"""Features of the frozen target on disk: shards with an index, made by all processes, each its own shards, and
resumable shard by shard.

The first process asks and writes the index; the others wait for it. A store is complete once every shard of its index
is there: each is written beside and renamed. No collective is needed, so processes may take unequal times, and one
that dies leaves nobody in one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.chat.pack import PackedRow
from drafters.base.errors import UserError
from drafters.base.files import atomic_write, atomic_write_text
from drafters.targets.target import Target
from train.target_features.features import Features, compute_features

INDEX = "index.json"
POLL_SECONDS = 0.5
STALL_SECONDS = 1800.0  # without a new shard, after which a process stops waiting for the others
OPEN_FILES = 256  # a large store has more shards than a process may have files open
MARGIN_BYTES, MARGIN_SHARE = 5e9, 0.05  # of the disk is left free, whichever is less

ShowRows = Callable[[int, int], None]  # rows done, rows in all


class StorePlan(NamedTuple):
    """A store that is or will be: its directory and shards, and the rows and taps it is made of."""

    place: Path
    rows: Sequence[PackedRow]
    tap_ids: Sequence[int]
    rows_per_shard: int
    row_bytes: int

    @property
    def names(self) -> list[str]:
        """The files of all shards."""
        return [f"shard-{number:05d}.safetensors" for number in range(-(-len(self.rows) // self.rows_per_shard))]

    @property
    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        return [number for number, name in enumerate(self.names) if not (self.place / name).is_file()]

    @property
    def missing_bytes(self) -> int:
        """What is still to be written."""
        return self.row_bytes * sum(len(self.shard(number)) for number in self.missing)

    @property
    def rows_done(self) -> int:
        """Rows of the shards that are there."""
        return len(self.rows) - sum(len(self.shard(number)) for number in self.missing)

    def shard(self, number: int) -> Sequence[PackedRow]:
        """The rows of one shard."""
        return self.rows[number * self.rows_per_shard : (number + 1) * self.rows_per_shard]


def plan_store(
    directory: Path, target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int], rows_per_shard: int
) -> StorePlan:
    """The store for `rows` below `directory`; nothing is written."""
    place = directory / f"{store_key(target, rows, tap_ids)}-{rows_per_shard}"
    size = target.lm_head_weight.element_size()
    row_bytes = store_bytes(1, len(rows[0].token_ids), target.facts.hidden_size, len(tap_ids), size)
    return StorePlan(place, rows, tap_ids, rows_per_shard, row_bytes)


def store_key(target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int]) -> str:
    """What a store depends on: the target's weights and dtype, what its head does beside a product, the taps, and
    every token, turn and document id of the rows.
    """
    head = "" if target.head.is_plain else f" {target.head.law} {target.head.bias is not None}"
    digest = hashlib.sha256(
        f"1 {target.facts.weight_hash} {target.lm_head_weight.dtype} {list(tap_ids)}{head}".encode()
    )
    for row in rows:
        for array in row:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def store_bytes(num_rows: int, length: int, hidden_size: int, num_taps: int = 3, bytes_per_number: int = 2) -> int:
    """Size of a store: taps and last hidden state, and six numbers of four bytes, for each position of each row."""
    return num_rows * length * ((num_taps + 1) * hidden_size * bytes_per_number + 6 * 4)


def write_indices(
    plans: Sequence[StorePlan], max_gigabytes: float, agrees: Callable[[str], bool], say: Callable[[str], None]
) -> None:
    """Say how large the stores are, ask where that is much, refuse what the disk has no room for, and write the
    indices.

    `agrees` is asked before more than `max_gigabytes` are written, unless an index says that it was asked before.
    """
    for plan in plans:
        remove_leftovers(plan.place)
    total = sum(plan.missing_bytes for plan in plans)
    directory = plans[0].place.parent
    whole = sum(plan.row_bytes * len(plan.rows) for plan in plans)
    rows = " + ".join(str(len(plan.rows)) for plan in plans)
    say(
        f"target features of {rows} rows: {gigabytes(whole)} in {directory}, "
        f"{gigabytes(total) if total else 'nothing'} to be written"
    )
    if total:
        refuse_to_fill(directory, total)
    new = [plan for plan in plans if not (plan.place / INDEX).is_file()]
    if new and total > max_gigabytes * 1e9 and not agrees(f"write {gigabytes(total)} of features to {directory}?"):
        raise UserError(
            f"the features would take {gigabytes(total)}, more than features.max_gigabytes = {max_gigabytes:g}: "
            "agree with --yes, raise it, set features.mode=online, "
            "or read fewer conversations (data.max_conversations)"
        )
    for plan in new:
        plan.place.mkdir(parents=True, exist_ok=True)
        index = {"shards": plan.names, "rows_per_shard": plan.rows_per_shard, "num_rows": len(plan.rows)}
        atomic_write_text(plan.place / INDEX, json.dumps(index))


def remove_leftovers(place: Path) -> None:
    """Remove half-written shards of processes that were killed; another run may be writing the same store now."""
    for left in place.glob(".shard-*"):
        if time.time() - left.stat().st_mtime > STALL_SECONDS:
            left.unlink(missing_ok=True)


def refuse_to_fill(directory: Path, num_bytes: int) -> None:
    """Raise `UserError` where writing `num_bytes` would leave next to nothing of the disk."""
    disk = shutil.disk_usage(directory)
    margin = min(MARGIN_BYTES, MARGIN_SHARE * disk.total)
    if num_bytes + margin > disk.free:
        raise UserError(
            f"the features would take {gigabytes(num_bytes)}, and the disk of {directory} has "
            f"{gigabytes(disk.free)} free, of which {gigabytes(margin)} are to stay so: make room, "
            "name another features.directory, or set features.mode=online"
        )


def build_share(
    plan: StorePlan, target: Target, rows_per_forward: int, share: tuple[int, int], show: ShowRows
) -> None:
    """Write this process's missing shards: those whose number leaves `share[0]` when divided by `share[1]`."""
    for number in range(share[0], len(plan.names), share[1]):
        if not (plan.place / plan.names[number]).is_file():  # another run may be writing the same store
            write_shard(plan, number, forwards(plan.shard(number), rows_per_forward), target)
            show(plan.rows_done, len(plan.rows))


def build_together(
    plan: StorePlan,
    target: Target,
    rows_per_forward: int,
    missing: Sequence[int],
    share: tuple[int, int],
    show: ShowRows,
) -> None:
    """Write the `missing` shards with a target that all processes hold together: each runs as many forwards as every
    other.

    A process without a shard in a round, or with a shorter one, repeats its last rows, because a forward is a
    collective.
    """
    rank, world = share
    per_shard = -(-min(plan.rows_per_shard, len(plan.rows)) // rows_per_forward)
    for first in range(0, len(missing), world):
        mine = missing[first : first + world][rank : rank + 1]
        parts = forwards(plan.shard((mine or missing)[0]), rows_per_forward)
        padded = parts + parts[-1:] * (per_shard - len(parts))
        if mine:
            write_shard(plan, mine[0], padded, target)
        else:
            for part in padded:
                compute_features(target, part, plan.tap_ids)
        show(plan.rows_done, len(plan.rows))


def forwards(rows: Sequence[PackedRow], rows_per_forward: int) -> list[Sequence[PackedRow]]:
    """`rows` cut into forwards."""
    return [rows[start : start + rows_per_forward] for start in range(0, len(rows), rows_per_forward)]


def write_shard(plan: StorePlan, number: int, parts: Iterable[Sequence[PackedRow]], target: Target) -> None:
    """Compute and write one shard; rows beyond its own are computed and left out."""
    size, computed = len(plan.shard(number)), []
    for part in parts:
        features = compute_features(target, part, plan.tap_ids)
        computed.append(Features(*(x.to("cpu", torch.int32 if x.dtype == torch.int64 else x.dtype) for x in features)))
    tensors = {
        name: torch.cat([getattr(part, name) for part in computed])[:size].contiguous() for name in Features._fields
    }
    try:
        atomic_write(plan.place / plan.names[number], lambda temporary: save_file(tensors, temporary))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{plan.place} cannot be written ({error}): make room, then run again; it goes on with the next shard"
        ) from error


def await_index(plan: StorePlan) -> None:
    """Wait until the first process has agreed to the store."""
    while not (plan.place / INDEX).is_file():
        time.sleep(POLL_SECONDS)


def await_shards(plan: StorePlan, show: ShowRows) -> None:
    """Wait until the other processes have written their shards. Raises `UserError` where nothing happens for long."""
    missing, since = plan.missing, time.monotonic()
    while missing:
        time.sleep(POLL_SECONDS)
        now_missing = plan.missing
        if len(now_missing) < len(missing):
            missing, since = now_missing, time.monotonic()
            show(plan.rows_done, len(plan.rows))
        if time.monotonic() - since > STALL_SECONDS:
            raise UserError(
                f"{plan.place}: no new shard in {STALL_SECONDS / 60:.0f} minutes, {len(missing)} are missing, "
                f"{plan.names[missing[0]]} first; is a process dead, or the directory not one for all nodes "
                "(features.per_node=true)? Run again to go on"
            )


class StoredFeatures:
    """Reads a complete store; files are mapped, so only the rows asked for are read."""

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        self.rows_per_shard, self.num_rows = index["rows_per_shard"], index["num_rows"]
        self.files = [directory / name for name in index["shards"]]
        self.opened = lru_cache(maxsize=OPEN_FILES)(open_shard)

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: Sequence[int]) -> Features:
        """Features of the rows with these numbers."""
        return Features(*(torch.stack([self._read(name, row) for row in rows]) for name in Features._fields))

    def _read(self, name: str, row: int) -> Tensor:
        shard, place = divmod(row, self.rows_per_shard)
        tensor = self.opened(self.files[shard]).get_slice(name)[place]
        return tensor.long() if tensor.dtype == torch.int32 else tensor


def open_shard(file: Path) -> Any:
    """A shard, mapped. Raises `UserError` where it is not whole."""
    try:
        return safe_open(file, framework="pt").__enter__()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it and run again, it will be made anew") from error


def gigabytes(num_bytes: float) -> str:
    """A size in words, with three digits that count."""
    return f"{num_bytes / 1e9:.3g} GB"
