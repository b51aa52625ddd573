"""The memory of a paged KV cache: keys and values of every layer, by slot.

Slot = block * block_size + offset. M key/value heads, D head size, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class KvShape(NamedTuple):
    """What a position leaves in one layer's pool: M heads of keys and of values, whose sizes differ in MLA."""

    heads: int
    key_dim: int
    value_dim: int


class KvPool(NamedTuple):
    """Keys and values of every layer, by slot."""

    keys: tuple[Tensor, ...]  # per layer [S, M, D]
    values: tuple[Tensor, ...]
    block_size: int

    @staticmethod
    def allocate(layers: int, num_blocks: int, block_size: int, heads_MD: tuple[int, int], like: Tensor) -> KvPool:
        """A zeroed pool of `num_blocks * block_size` slots of M key heads of size D, in the dtype and on the device of
        `like`.
        """
        return KvPool.of_shape(layers, num_blocks, block_size, KvShape(heads_MD[0], heads_MD[1], heads_MD[1]), like)

    @staticmethod
    def of_shape(layers: int, num_blocks: int, block_size: int, shape: KvShape, like: Tensor) -> KvPool:
        """`allocate`, with values of a size of their own."""
        slots = num_blocks * block_size
        keys, values = (
            tuple(zeros_on_demand((slots, shape.heads, size), like) for _ in range(layers))
            for size in (shape.key_dim, shape.value_dim)
        )
        return KvPool(keys, values, block_size)

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions `start..stop-1` of a request that owns `blocks` in this order."""
        size = self.block_size
        return [blocks[position // size] * size + position % size for position in range(start, stop)]

    def slots_of_all(self, blocks: Sequence[int], stop: int) -> np.ndarray:
        """`slots` from position 0 on, int64 [stop]: for many of them."""
        used = np.asarray(blocks[: -(-stop // self.block_size)], dtype=np.int64)
        return (used[:, None] * self.block_size + np.arange(self.block_size)).ravel()[:stop]


def zeros_on_demand(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros in the dtype and on the device of `like`. On CPU the memory is taken when it is first written, page by
    page.
    """
    if like.device.type != "cpu":
        return like.new_zeros(tuple(shape))
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * like.element_size()), dtype=np.uint8)).view(like.dtype)
