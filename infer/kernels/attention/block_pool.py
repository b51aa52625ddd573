"""Blocks of a KV pool: who refers to which, and which full ones can be found again by the tokens in them (the prefix
cache).

A block is free, held (one or more requests refer to it), or cached: published, held by nobody, and kept until its
place is needed. Requests get blocks that lie behind each other where possible, because such a run is read without
gathering.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

Key = tuple[
    Hashable, tuple[int, ...]
]  # the identity of the block before it (or of the chain's root), and its own tokens


class BlockPool:
    """The books of one KV pool of `num_blocks` blocks of `block_size` slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free = np.ones(num_blocks, dtype=bool)
        self._num_free = num_blocks
        self._wanted = np.zeros(
            num_blocks, dtype=bool
        )  # free ones into which the request before them may grow: a hint, no promise
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one that nobody has used for longest is first
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._identity: dict[
            int, int
        ] = {}  # of a published block: a number never given again, so that a chain names its content
        self._published = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, the cached ones among them: what could be handed out now."""
        return self._num_free + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to and that a request with the same beginning may find."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, room: int = 0, after: int | None = None) -> tuple[int, ...] | None:
        """`count` blocks, or None where so many cannot be had.

        Where possible behind block `after`; else at the start of a run of `room` free blocks, the rest of which others
        then avoid; else in any free run of `count`; else scattered. Cached blocks are given up only where free ones do
        not suffice.
        """
        assert count > 0, count
        if count > self.num_free:
            return None
        chosen = (
            self._following(after, count)
            or self._run(max(count, room), self._free & ~self._wanted)
            or self._run(count, self._free)
        )
        if not chosen:
            chosen = np.flatnonzero(self._free)[:count].tolist()
            chosen = sorted([*chosen, *(self._give_up_cached() for _ in range(count - len(chosen)))])
        elif room > count and len(chosen) == max(count, room):
            self._wanted[chosen[count:]] = True
        chosen = chosen[:count]
        self._num_free -= int(self._free[chosen].sum())
        self._free[chosen] = False
        self._wanted[chosen] = False
        for block in chosen:
            self._refs[block] = 1
        return tuple(chosen)

    def hold(self, blocks: Sequence[int]) -> None:
        """Refer to published blocks once more: what `find` gave stays as long as it is held."""
        for block in blocks:
            assert block in self._keys, f"block {block} is not published"
            self._refs[block] += 1
            self._cached.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a request's references, its last block first, so that the end of a cached chain is given up before its
        beginning.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} freed twice: {blocks}"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._leave(block)

    def find(self, root: Hashable, tokens: Sequence[int], most: int) -> list[int]:
        """The published chain of at most `most` full blocks that holds the beginning of `tokens`. `hold` it before
        anything else.
        """
        found: list[int] = []
        parent, size = root, self.block_size
        while len(found) < most:
            block = self._index.get((parent, tuple(tokens[len(found) * size : (len(found) + 1) * size])))
            if block is None:
                break
            found.append(block)
            parent = self._identity[block]
        return found

    def identity(self, block: int) -> int:
        """What names a published block as the parent of the next one."""
        return self._identity[block]

    def publish(self, block: int, parent: Hashable, tokens: Sequence[int]) -> int:
        """Let others find a held block whose keys are all written; its tokens, and what names the chain before it. Its
        identity.

        Where an equal block is published already, that one stays, and `block` remains its holder's own.
        """
        key = (parent, tuple(tokens))
        assert len(key[1]) == self.block_size and self._refs[block] > 0, (
            f"block {block}: {len(key[1])} tokens, {self._refs[block]} holders"
        )
        found = self._index.setdefault(key, block)
        if found == block and block not in self._keys:
            self._keys[block] = key
            self._published += 1
            self._identity[block] = self._published
        return self._identity[found]

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that the books are right, where `held` are the blocks of each request that refers to some."""
        references = Counter(block for blocks in held for block in blocks)
        counted = {block: count for block, count in enumerate(self._refs) if count}
        assert dict(references) == counted, f"held by requests: {dict(references)}; counted: {counted}"
        free = set(np.flatnonzero(self._free).tolist())
        cached = set(self._cached)
        assert len(free) == self._num_free, f"{len(free)} free blocks, counted {self._num_free}"
        assert not free & cached and not (free | cached) & set(counted), (
            f"free {free}, cached {cached}, held {set(counted)}"
        )
        assert len(free) + len(cached) + len(counted) == self.num_blocks, (
            f"{self.num_blocks} blocks, {free} {cached} {set(counted)}"
        )
        assert set(np.flatnonzero(self._wanted).tolist()) <= free, "room is kept in blocks that are not free"
        assert {block: key for key, block in self._index.items()} == self._keys, "index and keys differ"
        assert cached == set(self._keys) - set(counted) and set(self._identity) == set(self._keys), (
            "cached is published and not held"
        )

    def _leave(self, block: int) -> None:
        follower = block + 1
        while follower < self.num_blocks and self._wanted[follower]:
            self._wanted[follower] = False
            follower += 1
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free[block] = True
            self._num_free += 1

    def _give_up_cached(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._index[self._keys.pop(block)], self._identity[block]
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
