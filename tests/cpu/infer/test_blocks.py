"""Blocks of the KV pool: one owner each, in runs where a run is free, and all back at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.blocks import BlockPool


def plain_allocate(free: set[int], count: int, num_blocks: int) -> tuple[int, ...] | None:
    """The lowest run of free neighbours; without one, the lowest free blocks; None where there are too few."""
    if count > len(free):
        return None
    for first in range(num_blocks - count + 1):
        if all(block in free for block in range(first, first + count)):
            return tuple(range(first, first + count))
    return tuple(sorted(free)[:count])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 14), st.lists(st.tuples(st.booleans(), st.integers(1, 15)), max_size=30))
def test_the_pool_does_what_a_plain_model_does(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool, free, owned = BlockPool(num_blocks, 16), set(range(num_blocks)), []
    for take, number in actions:
        if take:
            expected = plain_allocate(free, number, num_blocks)
            assert pool.allocate(number) == expected
            if expected is not None:
                assert free >= set(expected), "two owners"
                free -= set(expected)
                owned.append(expected)
        elif owned:
            blocks = owned.pop(number % len(owned))
            pool.free(blocks)
            free |= set(blocks)
        assert pool.num_free == len(free)
    for blocks in owned:
        pool.free(blocks)
    assert pool.num_free == num_blocks and pool.allocate(num_blocks) == tuple(range(num_blocks))


def test_a_run_further_up_is_preferred_to_scattered_blocks() -> None:
    pool = BlockPool(8, 16)
    pool.allocate(8)
    pool.free([0, 2, 4, 5, 6])
    assert pool.allocate(2) == (4, 5)
    assert pool.allocate(3) == (0, 2, 6)
    assert pool.allocate(1) is None


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize("blocks", [[0], [1, 1]], ids=["not owned", "named twice"])
def test_freeing_twice_is_a_fault(blocks: list[int]) -> None:
    pool = BlockPool(3, 16)
    pool.allocate(3)
    pool.free([0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
