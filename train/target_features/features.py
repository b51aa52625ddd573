"""Features of the frozen target over packed rows, computed as they are needed (`train.target_features.store` keeps
them on disk).

Shapes: B rows of a batch, T positions, P positions, C = 3 Ht tap features, H target hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.chat.pack import PackedRow
from drafters.targets.head import TargetHead
from drafters.targets.taps import tap_features
from drafters.targets.target import Target
from infer.kernels.sampling.sample import greedy_ids

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
    log_normaliser, argmax = full_vocabulary(output.last_hidden_BTH.flatten(0, 1), target.head)
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


@torch.no_grad()
def full_vocabulary(last_hidden_PH: Tensor, head: TargetHead) -> tuple[Tensor, Tensor]:
    """Log-normaliser fp32 [P] and argmax int64 [P] of the target's logits, in tiles of TILE rows."""
    normalisers, tops = [], []
    for tile in last_hidden_PH.split(TILE):
        logits = head(tile).float()
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
        return compute_features(self.target, [self.rows[row] for row in rows], self.tap_ids)


class KeptFeatures:
    """Computed once and kept in memory: held-out rows of a sharded target, which one process alone cannot run."""

    def __init__(self, source: FeatureSource, num_rows: int, rows_per_forward: int) -> None:
        parts = []
        for first in range(0, num_rows, rows_per_forward):
            batch = source.batch(range(first, min(first + rows_per_forward, num_rows)))
            parts.append([tensor.cpu() for tensor in batch])
        self.features = Features(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.features.token_ids)

    def batch(self, rows: Sequence[int]) -> Features:
        """Features of the rows with these numbers."""
        return Features(*(tensor[list(rows)] for tensor in self.features))
