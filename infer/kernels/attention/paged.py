"""Paged attention of a batch: which slots of the KV pool each query row reads, and which implementation computes it.

Three implementations: compiled rows for few rows on a CPU (`cpu`), torch's own attention (`sdpa`), and a plain softmax
row by row, the truth of the tests (`reference`). Tree attention is this with a mask: a request's `mask_QL` says which
of its keys each row sees.

R query rows of all requests, Q rows of one request, L keys of one request, N query heads, M key/value heads, G = N /
M, D head size, S slots of the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.attention import cpu
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.sdpa import (
    Padded,
    additive_mask,
    are_alike,
    as_bias,
    attend_padded,
    attend_rows,
    causal_mask,
)

FEW_ROWS = 12  # up to this many rows the compiled kernel is faster than torch's attention on a CPU


@dataclass(frozen=True)
class PagedRequest:
    """One request's share of a batch: `num_rows` new rows at the end of `num_keys` keys that live in `blocks`."""

    blocks: tuple[int, ...]
    num_keys: int
    num_rows: int
    mask_QL: Tensor | None = None  # bool, True = visible; None is causal


@dataclass(frozen=True)
class PagedContext:
    """Attention of a batch over the pool. New keys are written first, then each request's rows read its own keys.

    Where a request's blocks lie behind each other its keys are a view of the pool; else they are gathered (a shared
    prefix lies elsewhere than what follows it), for all requests together where their lengths are alike. Requests of
    one row whose views are evenly spaced are computed in one call.
    """

    pool: KvPool
    requests: tuple[PagedRequest, ...]
    write_slots_R: Tensor
    reads: tuple[slice | Tensor, ...]
    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    tables: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def build(pool: KvPool, requests: Sequence[PagedRequest], device: torch.device) -> PagedContext:
        """Work out slots and views once for all layers."""
        write: list[int] = []
        reads: list[slice | Tensor] = []
        for request in requests:
            write += pool.slots(request.blocks, request.num_keys - request.num_rows, request.num_keys)
            reads.append(_reading(pool, request, device))
        return PagedContext(pool, tuple(requests), torch.tensor(write, device=device), tuple(reads))

    def attend(self, layer: int, query_1NRD: Tensor, key_1MRD: Tensor, value_1MRD: Tensor, scale: float) -> Tensor:
        """See `AttentionContext.attend`; rows are those of all requests behind each other."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self.write_slots_R, key_1MRD[0].transpose(0, 1))
        values.index_copy_(0, self.write_slots_R, value_1MRD[0].transpose(0, 1))
        query_RND = query_1NRD[0].transpose(0, 1)
        regular = self._regular()
        if regular is not None:
            return self._attend_together(query_RND, keys, values, scale, regular)[None]
        if self._padded is not None:
            return attend_padded(query_RND, keys, values, scale, self._padded)[None]
        pieces, start = [], 0
        for i, request in enumerate(self.requests):
            stop = start + request.num_rows
            read = self.reads[i]
            own_keys, own_values = (
                side[read] if isinstance(read, slice) else side.index_select(0, read) for side in (keys, values)
            )
            pieces.append(attend_rows(query_RND[start:stop], own_keys, own_values, self._mask(i, query_RND), scale))
            start = stop
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None]

    @cached_property
    def in_rows(self) -> bool:
        """Whether the compiled kernel (`cpu`) is the faster one for this batch: on a CPU, and few rows."""
        return len(self.write_slots_R) <= FEW_ROWS and cpu.available(self.pool.keys[0])

    def rotate_and_attend(self, layer: int, qkv_RX: Tensor, cos_sin: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """Rotate, write and attend in one layer by the compiled kernel, where `in_rows`; see `cpu.attend`."""
        return cpu.attend(qkv_RX, cos_sin, (self.pool.keys[layer], self.pool.values[layer]), self._table, scale)

    def widened(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables [1, R, D] as the compiled kernel reads them, fp32; widened once for all layers."""
        if "cos_sin" not in self.tables or self.tables["cos_sin"][0] is not cos:
            self.tables["cos_sin"] = (cos, cos.float().contiguous(), sin.float().contiguous())
        return self.tables["cos_sin"][1:]

    @cached_property
    def _table(self) -> cpu.RowTable:
        lists: list[np.ndarray] = []
        starts: list[int] = []
        counts: list[int] = []
        end = 0
        for request, read in zip(self.requests, self.reads, strict=True):
            rows, keys = request.num_rows, request.num_keys
            slots = np.arange(read.start, read.stop) if isinstance(read, slice) else read.numpy()
            if request.mask_QL is None:
                lists.append(slots)
                starts += [end] * rows
                counts += range(keys - rows + 1, keys + 1)
                end += keys
            else:
                visible_QL = request.mask_QL.numpy()
                lists.append(slots[np.nonzero(visible_QL)[1]])
                seen = visible_QL.sum(1).tolist()
                starts += [end + before for before in itertools.accumulate(seen[:-1], initial=0)]
                counts += seen
                end += sum(seen)
        return cpu.RowTable(self.write_slots_R.numpy(), np.concatenate(lists), np.array(starts), np.array(counts))

    def _mask(self, i: int, query: Tensor) -> Tensor | None:
        request = self.requests[i]
        if request.num_rows == 1 and request.mask_QL is None:
            return None
        groups = query.shape[1] // self.pool.keys[0].shape[1]
        key = (i, groups)
        if key not in self.masks:
            visible_QL = request.mask_QL
            if visible_QL is None:
                visible_QL = causal_mask(request.num_rows, request.num_keys, query.device)
            self.masks[key] = additive_mask(visible_QL, groups, query.dtype)
        return self.masks[key]

    @cached_property
    def _padded(self) -> Padded | None:
        """All requests in one shape, where some are gathered anyway and that costs little padding; else None."""
        if all(isinstance(read, slice) for read in self.reads):
            return None
        requests, device = self.requests, self.write_slots_R.device
        shapes = [(request.num_rows, request.num_keys) for request in requests]
        return Padded.of(shapes, self.reads, [r.mask_QL for r in requests], device) if are_alike(shapes) else None

    def _regular(self) -> tuple[int, int, int] | None:
        """`(first slot, slots between requests, longest)` where one strided view covers all requests, else None."""
        count = len(self.requests)
        if count < 4 or any(r.num_rows != 1 or r.mask_QL is not None for r in self.requests):
            return None
        starts = [read.start if isinstance(read, slice) else None for read in self.reads]
        first, second = starts[0], starts[1]
        if first is None or second is None:
            return None
        step, longest = second - first, max(r.num_keys for r in self.requests)
        evenly = all(start == first + i * step for i, start in enumerate(starts))
        fits = first + (count - 1) * step + longest <= self.pool.keys[0].shape[0]
        return (first, step, longest) if evenly and step > 0 and fits else None

    def _attend_together(
        self, query_RND: Tensor, keys: Tensor, values: Tensor, scale: float, regular: tuple[int, int, int]
    ) -> Tensor:
        first, step, longest = regular
        rows, kv_heads, head = query_RND.shape[0], keys.shape[1], keys.shape[2]
        key = (-1, longest)
        if key not in self.masks:
            lengths_B = torch.tensor([r.num_keys for r in self.requests], device=keys.device)
            visible = torch.arange(longest, device=keys.device)[None] < lengths_B[:, None]
            self.masks[key] = as_bias(visible, query_RND.dtype)[:, None, None]
        key_BMLD, value_BMLD = (
            side[first:].as_strided(
                (rows, kv_heads, longest, side.shape[2]), (step * side.stride(0), side.stride(1), side.stride(0), 1)
            )
            for side in (keys, values)
        )
        query_BMGD = query_RND.reshape(rows, kv_heads, -1, head)
        out = F.scaled_dot_product_attention(query_BMGD, key_BMLD, value_BMLD, attn_mask=self.masks[key], scale=scale)
        return out.reshape(rows, -1, values.shape[2])


def _reading(pool: KvPool, request: PagedRequest, device: torch.device) -> slice | Tensor:
    used = -(-request.num_keys // pool.block_size)
    first = request.blocks[0]
    if all(block == first + i for i, block in enumerate(request.blocks[:used])):
        return slice(first * pool.block_size, first * pool.block_size + request.num_keys)
    return torch.from_numpy(pool.slots_of_all(request.blocks, request.num_keys)).to(device)
