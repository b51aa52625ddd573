"""Features of the frozen target over packed rows: computed once and kept on disk in shards, or computed as they are needed.

Shapes: R rows of a shard, B rows of a batch, T positions, C = 3 Ht tap features, H target hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from data.pack import PackedRow
from drafters.errors import UserError
from drafters.targets import Target, tap_features
from infer.kernels.sample import greedy_ids

TILE = 256  # positions a [TILE, V] block of logits is made for


class Features(NamedTuple):
    """Packed rows with what the target knows at each position."""

    token_ids: Tensor  # int64 [B, T]
    turn_ids: Tensor  # int64 [B, T]
    document_ids: Tensor  # int64 [B, T]
    positions: Tensor  # int64 [B, T]
    taps: Tensor  # [B, T, C], the target's dtype
    last_hidden: Tensor  # [B, T, H], what the head reads
    log_normaliser: Tensor  # fp32 [B, T], over the full vocabulary
    argmax: Tensor  # int64 [B, T], target ids


class FeatureSource(Protocol):
    """Rows by number, with features."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int]) -> Features: ...


def compute_features(target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int]) -> Features:
    """One forward of the target over `rows`, plus log-normaliser and argmax, in tiles over positions."""

    def stacked(field: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(row, field) for row in rows])).long().to(target.device)

    token_ids, turn_ids, document_ids, positions = (stacked(field) for field in PackedRow._fields)
    output = tap_features(target, token_ids, positions, document_ids, tap_ids)
    log_normaliser, argmax = full_vocabulary(output.last_hidden_BTH.flatten(0, 1), target.lm_head_weight)
    shape = token_ids.shape
    return Features(
        token_ids,
        turn_ids,
        document_ids,
        positions,
        output.taps_BTC,
        output.last_hidden_BTH,
        log_normaliser.view(shape),
        argmax.view(shape),
    )


@torch.inference_mode()
def full_vocabulary(last_hidden_PH: Tensor, head_VH: Tensor) -> tuple[Tensor, Tensor]:
    """Log-normaliser fp32 [P] and argmax int64 [P] of the target's logits, never holding more than TILE rows of them."""
    normalisers, tops = [], []
    for tile in last_hidden_PH.split(TILE):
        logits = F.linear(tile, head_VH).float()
        best = torch.tensor(greedy_ids(logits), device=logits.device)
        largest = logits.gather(-1, best[:, None])
        # in place, from the maximum that is known already: three passes over the tile instead of six
        normalisers.append(logits.sub_(largest).exp_().sum(-1).log_() + largest[:, 0])
        tops.append(best)
    return torch.cat(normalisers), torch.cat(tops)


class OnlineFeatures:
    """The frozen target runs in the training process, for each batch anew."""

    def __init__(self, target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int]) -> None:
        self.target, self.rows, self.tap_ids = target, rows, tap_ids

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int]) -> Features:
        """Features of the rows with these numbers."""
        with torch.inference_mode():
            features = compute_features(self.target, [self.rows[row] for row in rows], self.tap_ids)
        return Features(*(tensor.clone() for tensor in features))  # inference tensors cannot enter autograd


class StoredFeatures:
    """Reads a store; files are mapped, so only the rows asked for are read."""

    def __init__(self, directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        self.rows_per_shard, self.num_rows = index["rows_per_shard"], index["num_rows"]
        self.shards = [safe_open(directory / name, framework="pt") for name in index["shards"]]

    def __len__(self) -> int:
        return self.num_rows

    def batch(self, rows: Sequence[int]) -> Features:
        """Features of the rows with these numbers."""
        return Features(*(torch.stack([self._read(name, row) for row in rows]) for name in Features._fields))

    def _read(self, name: str, row: int) -> Tensor:
        shard, place = divmod(row, self.rows_per_shard)
        tensor = self.shards[shard].get_slice(name)[place]
        return tensor.long() if tensor.dtype == torch.int32 else tensor


INDEX = "index.json"
POLL_SECONDS = 1.0


def store_key(target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int]) -> str:
    """What a store depends on: the target's weights and dtype, the taps, and every token, turn and document id of the rows."""
    digest = hashlib.sha256(f"1 {target.facts.weight_hash} {target.lm_head_weight.dtype} {list(tap_ids)}".encode())
    for row in rows:
        for array in row:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def store_bytes(num_rows: int, length: int, hidden_size: int, num_taps: int = 3, bytes_per_number: int = 2) -> int:
    """Size of a store: taps and last hidden state, and six numbers of four bytes, for each position of each row."""
    return num_rows * length * ((num_taps + 1) * hidden_size * bytes_per_number + 6 * 4)


def build_store(
    directory: Path,
    target: Target,
    rows: Sequence[PackedRow],
    tap_ids: Sequence[int],
    rows_per_shard: int,
    rows_per_forward: int,
    progress: Callable[[int, int], None],
) -> Path:
    """Write the store for `rows` below `directory`, or go on with a half-written one. Returns its own directory.

    `progress(done, total)` counts rows. Each shard is written beside and renamed, the index comes last: a store with an index
    is complete.
    """
    place = directory / f"{store_key(target, rows, tap_ids)}-{rows_per_shard}"
    place.mkdir(parents=True, exist_ok=True)
    if (place / INDEX).is_file():
        return place
    names = [f"shard-{number:05d}.safetensors" for number in range(-(-len(rows) // rows_per_shard))]
    for number, name in enumerate(names):
        first = number * rows_per_shard
        part = rows[first : first + rows_per_shard]
        if not (place / name).is_file():
            _write_shard(place / name, target, part, tap_ids, rows_per_forward, lambda done, first=first: progress(first + done, len(rows)))
        progress(first + len(part), len(rows))
    index = {"shards": names, "rows_per_shard": rows_per_shard, "num_rows": len(rows)}
    _write_beside(place / INDEX, lambda beside: beside.write_text(json.dumps(index), encoding="utf-8"))
    return place


def await_store(place: Path) -> None:
    """Wait until another process has completed the store."""
    while not (place / INDEX).is_file():
        time.sleep(POLL_SECONDS)


def refuse_if_large(num_bytes: int, max_gigabytes: float) -> None:
    """Raise `UserError` where a store would be larger than the user allows."""
    if num_bytes > max_gigabytes * 1e9:
        raise UserError(
            f"the feature store would take {num_bytes / 1e9:.1f} GB, features.max_gigabytes = {max_gigabytes:g}: "
            "raise it, set features.mode=online, or read fewer conversations (data.max_conversations)"
        )


def _write_shard(
    file: Path, target: Target, rows: Sequence[PackedRow], tap_ids: Sequence[int], rows_per_forward: int, progress: Callable[[int], None]
) -> None:
    parts = []
    for start in range(0, len(rows), rows_per_forward):
        features = compute_features(target, rows[start : start + rows_per_forward], tap_ids)
        parts.append(Features(*(x.to("cpu", torch.int32 if x.dtype == torch.int64 else x.dtype) for x in features)))
        progress(min(start + rows_per_forward, len(rows)))
    tensors = {name: torch.cat([getattr(part, name) for part in parts]).contiguous() for name in Features._fields}
    _write_beside(file, lambda beside: save_file(tensors, beside))


def _write_beside(final: Path, write: Callable[[Path], object]) -> None:
    beside = final.with_name(f".{final.name}.{os.getpid()}")
    write(beside)
    os.replace(beside, final)
