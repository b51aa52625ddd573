"""The drafter on its own device: weights packed, keys in a pool of regions, one forward over rows of several requests.

R rows, H drafter hidden size, B branches, K look-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.eagle3_ssd.checkpoint import LoadedDrafter
from drafters.eagle3_ssd.model import RMSNorm
from infer.blocks import BlockPool
from infer.kernels.decoder_layer import RmsNorm
from infer.kernels.linear import fuse, pack
from infer.kernels.paged_attention import KvPool, PagedContext, PagedRequest

BLOCK = 16


class DraftModel:
    """Runs `Eagle3Drafter` on paged keys. A request's region holds its slots in order, then whatever a round drafts."""

    def __init__(self, loaded: LoadedDrafter, pool_tokens: int) -> None:
        self.model, self.vocab, self.config, self.card = loaded.model, loaded.vocab, loaded.config, loaded.card
        self.model.requires_grad_(False).eval()
        self.embeddings = self.model.embed_tokens.weight
        self.blocks = BlockPool(-(-pool_tokens // BLOCK), BLOCK)
        heads_MD = (self.config.num_key_value_heads, self.config.head_dim)
        self.pool = KvPool.allocate(self.config.num_hidden_layers, self.blocks.num_blocks, BLOCK, heads_MD, like=self.embeddings)
        self.scale = self.config.head_dim**-0.5
        for part in list(self.model.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, RMSNorm):
                    setattr(part, name, RmsNorm(child.weight, child.eps))
            fuse(part, ["q_proj", "k_proj", "v_proj"])
            fuse(part, ["gate_proj", "up_proj"])
        pack(self.model)

    def forward(self, tokens: Sequence[int], features_RH: Tensor, positions: Sequence[int], requests: Sequence[PagedRequest]) -> Tensor:
        """One drafter step over rows of `requests`, behind each other: pre-norm hidden [R, H]. Writes the rows' keys."""
        device = self.embeddings.device
        context = PagedContext.build(self.pool, requests, device)

        def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return context.attend(layer_index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.scale)

        embeds = self.model.embed(torch.tensor([tokens], device=device))
        places = torch.tensor([positions], device=device)
        return self.model(embeds, features_RH[None].to(embeds.dtype), places, attend)[0]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Draft logits [R, Vd]."""
        return self.model.logits(hidden_RH)
