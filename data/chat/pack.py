"""Packs examples into rows of one length (best-fit decreasing), with document ids that keep attention inside documents
(data/README.md, section 2).
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.chat.render import Example
from drafters.base.errors import UserError


class PackedRow(NamedTuple):
    """One row of T tokens, as arrays of shape [T]; the rest of a row after its last document is padding, zero in all
    four.

    Two examples of 3 and 2 tokens in a row of 6:

        token_ids     a b c d e 0
        turn_ids      0 1 1 0 1 0     n >= 1 inside the n-th assistant turn of its document
        document_ids  1 1 1 2 2 0     0 is padding
        positions     0 1 2 0 1 0     restart in each document
    """

    token_ids: np.ndarray  # int64
    turn_ids: np.ndarray  # int32
    document_ids: np.ndarray  # int32
    positions: np.ndarray  # int64


class PackStats(NamedTuple):
    """What packing did: token counts over all rows, examples cut at the row length, and the share of the rows that is
    filled.
    """

    num_rows: int
    num_documents: int
    num_tokens: int
    num_supervised: int
    num_cut: int
    fill: float


def pack(examples: Sequence[Example], length: int, seed: int = 0) -> list[PackedRow]:
    """Pack `examples` into rows of `length` tokens, longest first, each into the fullest row it fits (best-fit
    decreasing).

    An example longer than `length` is cut. The rows come in an order drawn from `seed`; the same input gives the same
    rows.
    """
    if length < 1:
        raise UserError(f"length = {length}: rows need at least one token")
    generator = random.Random(seed)
    order = sorted(
        generator.sample(range(len(examples)), len(examples)), key=lambda index: -len(examples[index].token_ids)
    )
    contents = _best_fit([(index, _cost(examples[index], length)) for index in order], length)
    rows = [_build_row([examples[index] for index in row], length) for row in contents]
    generator.shuffle(rows)
    return rows


def pack_stats(examples: Sequence[Example], rows: Sequence[PackedRow]) -> PackStats:
    """Counts of what `pack(examples, ...)` made."""
    length = len(rows[0].token_ids) if rows else 0
    num_tokens = sum(int((row.document_ids > 0).sum()) for row in rows)
    return PackStats(
        num_rows=len(rows),
        num_documents=sum(int(row.document_ids.max()) for row in rows),
        num_tokens=num_tokens,
        num_supervised=sum(int((row.turn_ids > 0).sum()) for row in rows),
        num_cut=sum(len(example.token_ids) > length for example in examples),
        fill=num_tokens / (length * len(rows)) if rows else 0.0,
    )


def _cost(example: Example, length: int) -> int:
    return min(len(example.token_ids), length)


def _best_fit(costs: Sequence[tuple[int, int]], length: int) -> list[list[int]]:
    """Indices by row, for (index, cost) pairs in order; among rows with equal room the oldest takes the example."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index, cost in costs:
        if cost == 0:
            continue
        place = bisect_left(room, (cost, 0))
        if place == len(room):
            rows.append([])
            left, row = length, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - cost, row))
    return rows


def _build_row(documents: Sequence[Example], length: int) -> PackedRow:
    row = PackedRow(
        np.zeros(length, np.int64), np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.int64)
    )
    start = 0
    for number, document in enumerate(documents, start=1):
        size = _cost(document, length)
        part = slice(start, start + size)
        row.token_ids[part] = document.token_ids[:size]
        row.turn_ids[part] = document.turn_ids[:size]
        row.document_ids[part] = number
        row.positions[part] = np.arange(size)
        start += size
    return row
