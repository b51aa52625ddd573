"""The target in the runtime: paged keys, one forward over rows of several requests, logits and fused features of each row.

R rows of all requests, H drafter hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafters.targets import Target, taps_of
from infer.blocks import BlockPool
from infer.kernels import cpu_rows
from infer.kernels.paged_attention import KvPool, PagedContext, PagedRequest

BLOCK = 16


class Rows(NamedTuple):
    """One request's rows of a forward: `tokens` are at the end of its first `num_keys` positions."""

    tokens: Sequence[int]
    num_keys: int
    blocks: tuple[int, ...]


class TargetOutput(NamedTuple):
    """Of each row: what follows it, and the feature the drafter reads (None where no drafter listens)."""

    logits_RV: Tensor
    features_RH: Tensor | None


class TargetRunner:
    """Runs a loaded target on paged keys. `fuse_taps` is the drafter's `fc`, which works on the target's side."""

    def __init__(self, target: Target, pool_tokens: int, tap_ids: Sequence[int] = (), fuse_taps: nn.Module | None = None) -> None:
        self.target, self.tap_ids, self.fuse_taps = target, tuple(tap_ids), fuse_taps
        cpu_rows.compile_now(target.embed_weight)
        facts = target.facts
        self.blocks = BlockPool(-(-pool_tokens // BLOCK), BLOCK)
        heads_MD = (facts.num_key_value_heads, facts.head_dim)
        self.pool = KvPool.allocate(facts.num_hidden_layers, self.blocks.num_blocks, BLOCK, heads_MD, like=target.embed_weight)
        self.head = target.model.get_output_embeddings()
        self.decoder = target.model.get_decoder()

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows], last_only: bool = False) -> TargetOutput:
        """One forward; writes the rows' keys. `last_only`: logits of each request's last row alone (prompts), features of all."""
        device = self.target.device
        requests = [PagedRequest(r.blocks, r.num_keys, len(r.tokens)) for r in rows]
        context = PagedContext.build(self.pool, requests, device)
        ids = torch.tensor([[token for r in rows for token in r.tokens]], device=device)
        positions = torch.tensor([[p for r in rows for p in range(r.num_keys - len(r.tokens), r.num_keys)]], device=device)
        with taps_of(self.target, self.tap_ids) as found:
            output = self.decoder(input_ids=ids, position_ids=positions, use_cache=False, context=context)
        hidden_RH = output.last_hidden_state[0]
        if last_only:
            hidden_RH = hidden_RH[torch.tensor([len(r.tokens) for r in rows], device=device).cumsum(0) - 1]
        features = self.fuse_taps(torch.cat([found[tap][0] for tap in self.tap_ids], dim=-1)) if self.fuse_taps is not None else None
        return TargetOutput(self.head(hidden_RH), features)
