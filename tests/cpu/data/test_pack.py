"""Packing keeps every document whole and apart, wastes little, and depends on nothing but its input and the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat.pack import PackedRow, pack, pack_stats
from data.chat.render import Example
from drafters.base.errors import UserError


def example(number: int, size: int) -> Example:
    """Tokens that name their example and place, the second half of them an answer."""
    return Example(str(number), [1000 * number + i for i in range(size)], [int(i >= size // 2) for i in range(size)])


def documents(row: PackedRow) -> list[tuple[list[int], list[int]]]:
    """(token_ids, turn_ids) of each document of a row, in order."""
    parts = [row.document_ids == number for number in range(1, int(row.document_ids.max()) + 1)]
    return [(row.token_ids[part].tolist(), row.turn_ids[part].tolist()) for part in parts]


def test_two_documents_in_one_row() -> None:
    (row,) = pack([Example("b", [4, 5], [0, 1]), Example("a", [1, 2, 3], [0, 1, 1])], length=6)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 0]
    assert row.turn_ids.tolist() == [0, 1, 1, 0, 1, 0]
    assert row.document_ids.tolist() == [1, 1, 1, 2, 2, 0]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 0]
    assert [array.dtype for array in row] == [np.int64, np.int32, np.int32, np.int64]


def test_a_longer_example_is_cut_and_counted() -> None:
    examples = [example(1, 9), example(2, 4), example(3, 4)]
    rows = pack(examples, length=8)
    kept = [1000 + i for i in range(8)]
    assert sorted(len(documents(row)) for row in rows) == [1, 2]
    assert (kept, [0, 0, 0, 0, 1, 1, 1, 1]) in [document for row in rows for document in documents(row)]
    stats = pack_stats(examples, rows)
    assert stats == (2, 3, 16, 8, 1, 1.0)


def test_an_example_goes_to_the_fullest_row_it_fits() -> None:
    rows = pack([example(number, size) for number, size in enumerate([7, 6, 5, 3, 2], start=1)], length=10)
    sizes = sorted([len(tokens) for tokens, _ in documents(row)] for row in rows)
    assert sizes == [[5], [6, 2], [7, 3]]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), max_size=30), length=st.integers(1, 16), seed=st.integers(0, 3))
def test_packing_laws(sizes: list[int], length: int, seed: int) -> None:
    examples = [example(number, size) for number, size in enumerate(sizes, start=1)]
    rows = pack(examples, length, seed)
    expected = Counter((tuple(e.token_ids[:length]), tuple(e.turn_ids[:length])) for e in examples)
    assert Counter((tuple(tokens), tuple(turns)) for row in rows for tokens, turns in documents(row)) == expected
    for row in rows:
        filled = int((row.document_ids > 0).sum())
        assert all(len(array) == length for array in row)
        assert (row.document_ids[:filled] > 0).all() and not any(array[filled:].any() for array in row)
        assert set(np.diff(row.document_ids[:filled]).tolist()) <= {0, 1}  # each document is one run
        starts = np.flatnonzero(np.diff(row.document_ids[:filled], prepend=0))
        assert (row.positions[starts] == 0).all() and filled - int(
            (np.diff(row.positions[:filled]) == 1).sum()
        ) == len(starts)
    free = sorted(length - int((row.document_ids > 0).sum()) for row in rows)
    smallest = [min(len(tokens) for tokens, _ in documents(row)) for row in rows]
    assert len(rows) < 2 or free[-2] < min(smallest) or free[-2] + free[-1] < length  # no two rows could be one


def test_order_depends_on_the_seed_alone() -> None:
    examples = [example(number, 3 + number % 5) for number in range(1, 40)]
    tokens = [[row.token_ids.tolist() for row in pack(examples, 16, seed)] for seed in (0, 0, 1)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_nothing_to_pack_and_a_bad_length() -> None:
    assert pack([], 8) == []
    assert pack_stats([], []) == (0, 0, 0, 0, 0, 0.0)
    with pytest.raises(UserError, match="length = 0"):
        pack([example(1, 3)], 0)
