"""Runs the target on a paged KV pool: one forward over rows of several requests, with logits and fused features.

R rows of all requests, L rows whose logits are wanted, H drafter hidden size, V vocabulary, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafters.targets.taps import taps_of
from drafters.targets.target import Target
from infer.kernels.attention.block_pool import BlockPool
from infer.kernels.attention.kv_pool import KvPool, zeros_on_demand
from infer.kernels.attention.paged import PagedContext, PagedRequest
from infer.kernels.warm_up import compile_now

BLOCK = 16


class Rows(NamedTuple):
    """One request's rows of a forward: `tokens` are the last ones of its first `num_keys` positions."""

    tokens: Sequence[int]
    num_keys: int
    blocks: tuple[int, ...]
    num_logits: int  # how many of its last rows need logits


class TargetOutput(NamedTuple):
    """Logits of the rows that need them, and the fused features of all rows (None in mode ar)."""

    logits_LV: Tensor
    features_RH: Tensor | None


class TargetRunner:
    """Runs a loaded target on paged keys. `fuse_taps` makes one feature of the taps (`infer.draft.model.TapFusion`).

    The fused features have a pool of their own beside the KV pool, with the same slots. So a cached prefix has its
    features too, and a request can be admitted to a restarted drafter without a forward.
    """

    def __init__(
        self, target: Target, pool_tokens: int, tap_ids: Sequence[int] = (), fuse_taps: nn.Module | None = None
    ) -> None:
        self.target, self.tap_ids, self.fuse_taps = target, tuple(tap_ids), fuse_taps
        compile_now(target.embed_weight)
        facts = target.facts
        self.blocks = BlockPool(-(-pool_tokens // BLOCK), BLOCK)
        self.pool = KvPool.of_shape(
            facts.num_hidden_layers, self.blocks.num_blocks, BLOCK, facts.kv, like=target.embed_weight
        )
        self.features_SH: Tensor | None = None  # its width is the drafter's, known with the first forward
        self.head = target.head
        self.decoder = target.model.get_decoder()

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows]) -> TargetOutput:
        """One forward; writes the rows' keys and features."""
        device = self.target.device
        context = PagedContext.build(
            self.pool, [PagedRequest(r.blocks, r.num_keys, len(r.tokens)) for r in rows], device
        )
        ids = torch.tensor([[token for r in rows for token in r.tokens]], device=device)
        positions = torch.tensor(
            [[p for r in rows for p in range(r.num_keys - len(r.tokens), r.num_keys)]], device=device
        )
        with taps_of(self.target, self.tap_ids) as found:
            output = self.decoder(input_ids=ids, position_ids=positions, use_cache=False, context=context)
        hidden_RH = output.last_hidden_state[0]
        if any(r.num_logits < len(r.tokens) for r in rows):
            hidden_RH = hidden_RH[torch.tensor(_asked_for(rows), dtype=torch.int64, device=device)]
        features = None
        if self.fuse_taps is not None:
            features = self.fuse_taps([found[tap][0] for tap in self.tap_ids])
            if self.features_SH is None:
                self.features_SH = zeros_on_demand((len(self.pool.keys[0]), features.shape[-1]), like=features)
            self.features_SH.index_copy_(0, context.write_slots_R, features)
        logits = self.head(hidden_RH) if len(hidden_RH) else hidden_RH.new_empty(0, self.target.facts.vocab_size)
        return TargetOutput(logits, features)

    def features_of(self, blocks: Sequence[int], stop: int) -> Tensor:
        """The features of positions 0..stop-1 of a request that owns `blocks`, whose keys are written: [stop, H]."""
        assert self.features_SH is not None, "no forward has run yet"
        return self.features_SH[torch.from_numpy(self.pool.slots_of_all(blocks, stop)).to(self.features_SH.device)]


def _asked_for(rows: Sequence[Rows]) -> list[int]:
    """Which rows' logits are wanted. Rows of 3 and 2 tokens, the last 1 and 2 of them: [2, 3, 4]."""
    wanted, end = [], 0
    for r in rows:
        end += len(r.tokens)
        wanted += range(end - r.num_logits, end)
    return wanted
