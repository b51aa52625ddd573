"""Packed rows for the tests of features."""

from __future__ import annotations

import numpy as np
import torch

from data.chat.pack import PackedRow
from train.target_features.features import Features

TAPS = (1, 3, 5)


def rows(number: int, length: int = 20) -> list[PackedRow]:
    """Each row holds documents of 8 and 9 tokens, and padding."""
    draw = np.random.default_rng(0)
    result = []
    for _ in range(number):
        documents = np.array([1] * 8 + [2] * 9 + [0] * 3, dtype=np.int32)
        positions = np.array([*range(8), *range(9), 0, 0, 0], dtype=np.int64)
        turns = np.array([0] * 4 + [1] * 4 + [0] * 5 + [1] * 4 + [0] * 3, dtype=np.int32)
        result.append(PackedRow(draw.integers(3, 250, length) * (documents > 0), turns, documents, positions))
    return result


def equal(a: Features, b: Features) -> None:
    for name, x, y in zip(Features._fields, a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), name
