"""A Llama decoder layer in a third of the operations, put in the place of transformers' own at load
(`drafters.targets.target`), and of the drafter's in serving (`infer.draft.model`).

The arithmetic is the layer's; it rounds fewer intermediate results to the model's dtype.

B batch, S rows, H hidden size, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infer.kernels.attention.paged import AttentionContext, PagedContext
from infer.kernels.decoder_layer import cpu as cpu_rows
from infer.kernels.linear.packed import PackedLinear, is_plain

SUPPORTED = ("LlamaDecoderLayer",)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, weight_H.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return cpu_rows.norm(x, self.weight, self.eps)


class FusedDecoderLayer(nn.Module):
    """One layer from its norms and projections; called as transformers calls its own, with attention through
    `context`.
    """

    def __init__(
        self,
        layer_idx: int,
        head_dim: int,
        scale: float,
        norms: Sequence[RmsNorm],
        attention: Sequence[Any],
        mlp: Sequence[Any],
    ) -> None:
        """`norms`: before attention (not where the caller does it, see `forward_normed`) and before the MLP.

        `attention`: projections of queries, keys, values and output; `mlp`: gate, up, down.
        """
        super().__init__()
        self.layer_idx, self.head_dim, self.scale = layer_idx, head_dim, scale
        self.input_norm, self.mlp_norm = norms
        self.qkv, self.out = _fused(*attention[:3]), _fused(attention[3])
        self.gate_up, self.down = _fused(*mlp[:2]), _fused(mlp[2])
        self.num_queries: int = attention[0].out_features // head_dim
        self.num_keys: int = attention[1].out_features // head_dim

    @staticmethod
    def of_llama(layer: Any) -> FusedDecoderLayer:
        """From a layer of transformers' Llama."""
        attention, mlp = layer.self_attn, layer.mlp
        norms = [
            RmsNorm(n.weight, n.variance_epsilon) for n in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        return FusedDecoderLayer(
            attention.layer_idx,
            attention.head_dim,
            attention.scaling,
            norms,
            [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj],
            [mlp.gate_proj, mlp.up_proj, mlp.down_proj],
        )

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], context: AttentionContext, **_: object
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]; `position_embeddings` are transformers' cosines and sines, [B, S, D]."""
        return self.forward_normed(hidden_states, self.input_norm(hidden_states), position_embeddings, context)

    def forward_normed(
        self, residual: Tensor, normed: Tensor, turn: tuple[Tensor, Tensor], context: AttentionContext
    ) -> Tensor:
        """The layer after its first norm: `normed` [B, S, X] is what the projections read, `residual` [B, S, H] what
        is added to.
        """
        qkv = self.qkv(normed)
        if isinstance(context, PagedContext) and context.in_rows:
            mixed = context.attend_rows(self.layer_idx, qkv, context.turn(*turn), self.scale)
        else:
            heads_BSND = qkv.unflatten(-1, (-1, self.head_dim))
            turned = rotate(heads_BSND[..., : self.num_queries + self.num_keys, :], *turn)
            query, key = (
                turned[..., : self.num_queries, :].transpose(1, 2),
                turned[..., self.num_queries :, :].transpose(1, 2),
            )
            value = heads_BSND[..., self.num_queries + self.num_keys :, :].transpose(1, 2)
            mixed = context.attend(self.layer_idx, query, key, value, self.scale).flatten(-2)
        hidden, normed = cpu_rows.add_norm(residual, self.out(mixed), self.mlp_norm.weight, self.mlp_norm.eps)
        return self.down.add_to(cpu_rows.silu_mul(self.gate_up(normed)), hidden)


def rotate(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Half-rotation by position: x * cos + [-second half, first half] * sin, with one roll instead of two slices and a
    cat.
    """
    half = x_BSND.shape[-1] // 2
    signed = torch.cat([-sin_BSD[..., :half], sin_BSD[..., half:]], dim=-1)[:, :, None]
    return torch.addcmul(x_BSND * cos_BSD[:, :, None], x_BSND.roll(half, -1), signed).to(x_BSND.dtype)


def fits(layer: Any) -> bool:
    """Whether `FusedDecoderLayer` computes what this layer does."""
    if type(layer).__name__ not in SUPPORTED or not all(
        is_plain(module) for module in layer.modules() if hasattr(module, "in_features")
    ):
        return False
    return type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _fused(*layers: nn.Linear) -> PackedLinear:
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return PackedLinear(weight, bias)
