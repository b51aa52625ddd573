"""Blocks of a KV pool: who owns which, handed out in runs where possible, because a run is read without gathering."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Counts the blocks of one KV pool. `allocate` prefers the lowest run of neighbours and falls back to scattered blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = set(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks, or None where so many are not free. In ascending order; neighbours where a run of that length is free."""
        if count > len(self._free):
            return None
        ordered = sorted(self._free)
        chosen = next(
            (ordered[i : i + count] for i in range(len(ordered) - count + 1) if ordered[i + count - 1] - ordered[i] == count - 1),
            ordered[:count],
        )
        self._free.difference_update(chosen)
        return tuple(chosen)

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        given = set(blocks)
        assert not given & self._free and len(given) == len(blocks), f"freed twice: {sorted(given & self._free)}"
        self._free |= given
