"""The n-gram look-up in a request's own tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.draft.settings import Fallback
from infer.text.ngram import NgramIndex, ngram_propose


@pytest.mark.parametrize(
    ("tokens", "lookahead", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 9, [3, 9, 1, 2]),  # no more than the text holds
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the latest occurrence
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),  # a longer suffix beats a later one
        ([5, 5, 5, 5], 3, [5]),  # an occurrence may overlap the suffix, but something follows it
        ([1, 2, 3], 3, []),
        ([1, 9, 1], 3, []),  # one token is no evidence
        ([1], 3, []),
        ([], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_by_hand(tokens: list[int], lookahead: int, expected: list[int]) -> None:
    assert ngram_propose(tokens, lookahead) == expected
    assert NgramIndex(tokens).propose(lookahead) == expected


def test_shortest_suffix_is_a_setting() -> None:
    assert ngram_propose([1, 9, 1], 3, min_n=1) == NgramIndex([1, 9, 1], min_n=1).propose(3) == [9, 1]


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=15), st.integers(0, 5))
def test_the_growing_index_equals_its_plain_twin(blocks: list[list[int]], lookahead: int) -> None:
    index, tokens = NgramIndex(), []
    for block in blocks:
        index.extend(block)
        tokens += block
        assert index.propose(lookahead) == ngram_propose(tokens, lookahead)


def test_names_of_the_setting() -> None:
    assert [fallback.value for fallback in Fallback] == ["jit", "ngram", "none"]
    assert Fallback("jit") is Fallback.JIT
