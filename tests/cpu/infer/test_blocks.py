"""The block pool against a plain model: references, prefix matches, the order of eviction, and runs of blocks where a
run is free.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.kernels.attention.block_pool import BlockPool


class PlainPool:
    """Blocks as a dictionary of contents, in the order in which nobody used them any more. No numbers are predicted,
    only what is true.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.references: Counter[int] = Counter()
        self.content: dict[
            int, tuple[int, ...]
        ] = {}  # cached block -> all tokens from the start of the text to its end
        self.unused: list[int] = []  # cached and referenced by nobody, oldest first
        self.num_blocks, self.block_size = num_blocks, block_size

    def take(self, blocks: tuple[int, ...], free_before: int) -> None:
        """Blocks were allocated: nobody's, and cached ones only where free ones did not suffice, oldest first."""
        assert len(set(blocks)) == len(blocks) and not any(self.references[b] for b in blocks), "two owners"
        evicted = [b for b in self.unused if b in blocks]
        uncached = free_before - len(self.unused)
        assert evicted == self.unused[: max(0, len(blocks) - uncached)]
        for block in blocks:
            self.references[block] = 1
            self.content.pop(block, None)
        self.unused = [b for b in self.unused if b not in blocks]

    def longest(self, tokens: list[int], most: int) -> int:
        """How many full blocks of `tokens` some cached chain holds."""
        found = set(self.content.values())
        count = 0
        while count < most and tuple(tokens[: (count + 1) * self.block_size]) in found:
            count += 1
        return count


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 12), st.data())
def test_the_pool_keeps_what_a_plain_model_keeps(num_blocks: int, data: st.DataObject) -> None:
    """Requests over two tokens come, match their prefix, cache the rest, and leave: the chains matched are the
    longest there.
    """
    size = 2
    pool, plain = BlockPool(num_blocks, size), PlainPool(num_blocks, size)
    requests: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if requests and data.draw(st.booleans()):
            blocks = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
            pool.free(blocks)
            for block in reversed(blocks):
                plain.references[block] -= 1
                if not plain.references[block] and block in plain.content:
                    plain.unused.append(block)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
            found = pool.match_prefix("root", tokens, most=(len(tokens) - 1) // size)
            assert len(found) == plain.longest(tokens, (len(tokens) - 1) // size)
            assert all(plain.content[b] == tuple(tokens[: (i + 1) * size]) for i, b in enumerate(found))
            pool.incref(found)
            plain.references.update(found)
            plain.unused = [b for b in plain.unused if b not in found]
            before, count = pool.num_free, pool.blocks_for(len(tokens)) - len(found)
            new = pool.allocate(count, data.draw(st.integers(0, 6)), found[-1] if found else None)
            assert (new is None) == (count > before)
            if new is None:
                pool.free(found)
                plain.references.subtract(found)
                plain.unused += [b for b in reversed(found) if not plain.references[b]]
            else:
                plain.take(new, before)
                blocks = (*found, *new)
                requests.append(blocks)
                chain = pool.block_hash(found[-1]) if found else "root"
                for i in range(len(found), len(tokens) // size):
                    known = tuple(tokens[: (i + 1) * size]) in set(plain.content.values())
                    chain = pool.cache_block(blocks[i], chain, tokens[i * size : (i + 1) * size])
                    if not known:
                        plain.content[blocks[i]] = tuple(tokens[: (i + 1) * size])
        pool.check(requests)
        assert pool.num_cached == len(plain.unused)
        assert pool.num_free == num_blocks - len([b for b, count in plain.references.items() if count])
    for blocks in requests:
        pool.free(blocks)
    pool.check([])
    assert pool.num_free == num_blocks and len(pool.allocate(num_blocks) or ()) == num_blocks and pool.num_cached == 0


def test_a_run_further_up_is_preferred_to_scattered_blocks() -> None:
    pool = BlockPool(8, 16)
    pool.allocate(8)
    pool.free([0, 2, 4, 5, 6])
    assert pool.allocate(2) == (4, 5)
    assert pool.allocate(3) == (0, 2, 6)
    assert pool.allocate(1) is None


def test_a_request_grows_in_place_because_others_keep_out_of_its_room() -> None:
    pool = BlockPool(10, 16)
    first, second = pool.allocate(1, room=4), pool.allocate(2, room=4)
    assert (first, second) == ((0,), (4, 5))
    assert pool.allocate(1) == (8,), "not in the room of others while there is space elsewhere"
    assert pool.allocate(1, after=0) == (1,) and pool.allocate(1, after=5) == (6,)
    assert pool.allocate(2, room=4) == (2, 3), "room is a wish, not a claim"
    pool.free([4, 5, 6])
    pool.check([(0, 1), (8,), (2, 3)])
    assert pool.allocate(2, room=4) == (4, 5), "who leaves takes its wish along"


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, 1)
    blocks = pool.allocate(3)
    assert blocks is not None
    chain: object = "root"
    for block, token in zip(blocks, (7, 8, 9), strict=True):
        chain = pool.cache_block(block, chain, [token])
    pool.free(blocks)
    assert pool.match_prefix("root", [7, 8, 9], 3) == [0, 1, 2] and pool.num_free == 3
    assert pool.allocate(1) == (2,)
    assert pool.match_prefix("root", [7, 8, 9], 3) == [0, 1]
    assert (
        pool.match_prefix("root", [7, 8, 9], 1) == [0]
        and pool.match_prefix("root", [8], 1) == []
        and pool.match_prefix("other", [7], 1) == []
    )


def test_only_full_blocks_that_are_referenced_are_cached() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="3 tokens"):
        pool.cache_block(0, "root", [1, 2, 3])
    with pytest.raises(AssertionError, match="0 references"):
        pool.cache_block(1, "root", [1, 2, 3, 4])


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


def test_a_check_finds_what_is_held_by_nobody_and_what_is_not_counted() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    assert blocks is not None
    for tables in ([], [(0,)], [blocks, blocks], [(0, 1, 2)]):
        with pytest.raises(AssertionError, match="counted"):
            pool.check(tables)
    pool.check([blocks])
