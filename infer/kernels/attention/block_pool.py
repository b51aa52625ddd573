"""Blocks of a paged KV pool: reference counts, and the prefix cache that finds full blocks again by their tokens.

A block table is the tuple of blocks that a request owns, in the order of its tokens: position p of the request lies in
block `table[p // block_size]`, at slot `table[p // block_size] * block_size + p % block_size` of the pool
(`kv_pool.KvPool.slots`). Attention reads a request's keys through it.

A block is free, referenced (by one or more requests), or cached: its content is known, no request refers to it, and it
is kept until its place is needed, least recently used first. Requests get blocks that follow one another where
possible, because such a run is read as a view of the pool, without gathering.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

Key = tuple[Hashable, tuple[int, ...]]  # hash of the block before it (or the chain's root), and its own tokens


class BlockPool:
    """Who refers to which of the `num_blocks` blocks of `block_size` slots, and what the cached ones hold."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free = np.ones(num_blocks, dtype=bool)
        self._num_free = num_blocks
        # Free blocks into which the request before them may grow: a hint, no promise.
        self._reserved = np.zeros(num_blocks, dtype=bool)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._hashes: dict[int, int] = {}
        self._num_hashes = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request refers to, cached ones included: what could be handed out now."""
        return self._num_free + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request refers to and that a request with the same prefix may match."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, room: int = 0, after: int | None = None) -> tuple[int, ...] | None:
        """`count` blocks, or None where so many cannot be had.

        Where possible behind block `after`; else at the start of a run of `room` free blocks, the rest of which others
        then avoid; else in any free run of `count`; else scattered. Cached blocks are evicted only where free ones do
        not suffice.
        """
        assert count > 0, count
        if count > self.num_free:
            return None
        chosen = (
            self._following(after, count)
            or self._run(max(count, room), self._free & ~self._reserved)
            or self._run(count, self._free)
        )
        if not chosen:
            chosen = np.flatnonzero(self._free)[:count].tolist()
            chosen = sorted([*chosen, *(self._evict() for _ in range(count - len(chosen)))])
        elif room > count and len(chosen) == max(count, room):
            self._reserved[chosen[count:]] = True
        chosen = chosen[:count]
        self._num_free -= int(self._free[chosen].sum())
        self._free[chosen] = False
        self._reserved[chosen] = False
        for block in chosen:
            self._refs[block] = 1
        return tuple(chosen)

    def incref(self, blocks: Sequence[int]) -> None:
        """Refer once more to blocks that `match_prefix` gave, so that they stay."""
        for block in blocks:
            assert block in self._keys, f"block {block} is not in the prefix cache"
            self._refs[block] += 1
            self._cached.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a request's references, its last block first, so that the end of a cached chain is evicted before its
        beginning.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} freed twice: {blocks}"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._release(block)

    def match_prefix(self, root: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """The longest chain of at most `most` full blocks in the prefix cache that holds the beginning of `tokens`.

        `incref` it before anything else is allocated.
        """
        found: list[int] = []
        parent, size = root, self.block_size
        while len(found) < most:
            block = self._index.get((parent, tuple(tokens[len(found) * size : (len(found) + 1) * size])))
            if block is None:
                break
            found.append(block)
            parent = self._hashes[block]
        return found

    def block_hash(self, block: int) -> int:
        """What stands for the content of a block in the prefix cache and of all blocks before it, as the parent of the
        next one.

        A number that is never given again, not a hash of the tokens: two contents cannot collide.
        """
        return self._hashes[block]

    def cache_block(self, block: int, parent: Hashable, tokens: Sequence[int]) -> int:
        """Put a referenced block whose keys are all written into the prefix cache; returns its hash.

        `parent` is the hash of the block before it, or the chain's root. Where an equal block is cached already, that
        one stays, and `block` remains its request's own.
        """
        key = (parent, tuple(tokens))
        assert len(key[1]) == self.block_size and self._refs[block] > 0, (
            f"block {block}: {len(key[1])} tokens, {self._refs[block]} references"
        )
        found = self._index.setdefault(key, block)
        if found == block and block not in self._keys:
            self._keys[block] = key
            self._num_hashes += 1
            self._hashes[block] = self._num_hashes
        return self._hashes[found]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every count is right, given the block table of each request that has one."""
        references = Counter(block for table in tables for block in table)
        counted = {block: count for block, count in enumerate(self._refs) if count}
        assert dict(references) == counted, f"in block tables: {dict(references)}; counted: {counted}"
        free = set(np.flatnonzero(self._free).tolist())
        cached = set(self._cached)
        assert len(free) == self._num_free, f"{len(free)} free blocks, counted {self._num_free}"
        assert not free & cached and not (free | cached) & set(counted), (
            f"free {free}, cached {cached}, referenced {set(counted)}"
        )
        assert len(free) + len(cached) + len(counted) == self.num_blocks, (
            f"{self.num_blocks} blocks, {free} {cached} {set(counted)}"
        )
        assert set(np.flatnonzero(self._reserved).tolist()) <= free, "blocks are reserved that are not free"
        assert {block: key for key, block in self._index.items()} == self._keys, "index and keys differ"
        assert cached == set(self._keys) - set(counted) and set(self._hashes) == set(self._keys), (
            "cached blocks are those in the index that no request refers to"
        )

    def _release(self, block: int) -> None:
        follower = block + 1
        while follower < self.num_blocks and self._reserved[follower]:
            self._reserved[follower] = False
            follower += 1
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free[block] = True
            self._num_free += 1

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._index[self._keys.pop(block)], self._hashes[block]
        return block

    def _following(self, after: int | None, count: int) -> list[int]:
        """The `count` blocks behind `after` where they are free, else none."""
        if after is None or after + count >= self.num_blocks or not self._free[after + 1 : after + 1 + count].all():
            return []
        return list(range(after + 1, after + 1 + count))

    def _run(self, length: int, among: np.ndarray) -> list[int]:
        """The lowest run of `length` blocks among those marked, or none."""
        edges = np.flatnonzero(np.diff(among, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        fitting = np.flatnonzero(stops - starts >= length)
        if not len(fitting):
            return []
        first = int(starts[fitting[0]])
        return list(range(first, first + length))
