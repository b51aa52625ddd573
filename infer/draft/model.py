"""Runs the drafter on a paged KV pool: packed weights, one forward over rows of several requests.

R rows, H drafter hidden size, B branches, K look-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafters.eagle3_ssd.checkpoint import LoadedDrafter
from drafters.eagle3_ssd.model import Eagle3Drafter, rotary
from infer.kernels.attention.block_pool import BlockPool
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import PagedContext, PagedRequest
from infer.kernels.decoder_layer.fused_layer import FusedDecoderLayer, Norm
from infer.kernels.decoder_layer.op import pair_norm
from infer.kernels.linear.packed import PackedLinear
from infer.kernels.warm_up import compile_now

BLOCK = 16


class DraftModel:
    """Runs an `Eagle3Drafter`'s weights on paged keys. A request's blocks hold its committed slots in order, then the
    in-flight slots and the tree nodes of a round.
    """

    def __init__(self, loaded: LoadedDrafter, pool_tokens: int) -> None:
        self.vocab, self.config, self.card = loaded.vocab, loaded.config, loaded.card
        model = loaded.model.requires_grad_(False).eval()
        self.embeddings = model.embed_tokens.weight
        compile_now(self.embeddings)
        self.blocks = BlockPool(-(-pool_tokens // BLOCK), BLOCK)
        heads_MD = (self.config.num_key_value_heads, self.config.head_dim)
        self.pool = KvPool.allocate(
            self.config.num_hidden_layers, self.blocks.num_blocks, BLOCK, heads_MD, like=self.embeddings
        )
        mid, others = model.midlayer, list(model.layers.values())
        self.token_weight_H, self.feature_weight_H = (
            mid.input_layernorm.weight.detach(),
            mid.hidden_norm.weight.detach(),
        )
        self.layers = [_fused(layer) for layer in (mid, *others)]
        self.feature_norm = None if model.feature_norm is None else _norm(model.feature_norm)
        self.norm = _norm(model.norm)
        self.head = PackedLinear(model.lm_head.weight)

    def forward(
        self, tokens: Sequence[int], features_RH: Tensor, positions: Sequence[int], requests: Sequence[PagedRequest]
    ) -> Tensor:
        """One drafter step over rows of `requests`, behind each other: what is fed back, [R, H]. Writes the rows'
        keys.
        """
        device = self.embeddings.device
        context = PagedContext.build(self.pool, requests, device)
        cos_sin = rotary(torch.tensor([positions], device=device), self.config.rope)
        embeds = self.embeddings[torch.tensor(tokens, device=device)][None]
        hidden = features_RH[None].to(embeds.dtype)
        hidden = hidden if self.feature_norm is None else self.feature_norm(hidden)
        both = pair_norm(embeds, self.token_weight_H, hidden, self.feature_weight_H, self.config.rms_norm_eps)
        hidden = self.layers[0].forward_normed(hidden, both, cos_sin, context)
        for layer in self.layers[1:]:
            hidden = layer(hidden, cos_sin, context)
        return (self.norm(hidden) if self.config.norm_output else hidden)[0]

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Draft logits [R, Vd]."""
        return self.head(hidden_RH if self.config.norm_output else self.norm(hidden_RH))


class TapFusion(nn.Module):
    """The drafter's `fc`, and its norms of the taps where it has them, packed: it works on the target's side."""

    def __init__(self, model: Eagle3Drafter) -> None:
        super().__init__()
        self.norms = [_norm(norm) for norm in model.fc_norm or ()]
        self.fc = PackedLinear(model.fc.weight.detach().clone())

    def forward(self, taps: Sequence[Tensor]) -> Tensor:
        """Taps [..., Ht] each to features [..., H]."""
        normed = [norm(tap) for norm, tap in zip(self.norms, taps, strict=True)] if self.norms else taps
        return self.fc(torch.cat(tuple(normed), dim=-1))


def _norm(norm: Any) -> Norm:
    return Norm.of(norm.weight, norm.eps)


def _fused(layer: Any) -> FusedDecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return FusedDecoderLayer(
        attention.layer_index,
        attention.head_dim,
        attention.head_dim**-0.5,
        norms,
        [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj],
        [mlp.gate_proj, mlp.up_proj, mlp.down_proj],
    )
