"""A Llama decoder layer in a third of the operations: projections fused, small operations compiled.

Put in the place of transformers' own layer at load (`drafters.targets.target`), and of the drafter's in serving
(`infer.draft.model`). The arithmetic is the layer's; it rounds fewer intermediate results to the model's dtype.

B batch, S rows, H hidden size, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from infer.kernels.attention.context import AttentionContext
from infer.kernels.attention.paged import PagedContext
from infer.kernels.decoder_layer import op
from infer.kernels.decoder_layer.reference import rotate
from infer.kernels.linear.packed import PackedLinear, is_plain

SUPPORTED = ("LlamaDecoderLayer",)


class Norm(NamedTuple):
    """An RMS norm: its weight [H], without gradient, and its epsilon."""

    weight: Tensor
    eps: float

    @staticmethod
    def of(weight_H: Tensor, eps: float) -> Norm:
        """From a model's parameter, which stays as it is."""
        return Norm(weight_H.detach(), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return op.rms_norm(x, self.weight, self.eps)


class FusedDecoderLayer(nn.Module):
    """One layer from its norms and projections; called as transformers calls its own, with attention through
    `context`.
    """

    def __init__(
        self,
        layer_idx: int,
        head_dim: int,
        scale: float,
        norms: Sequence[Norm],
        attention: Sequence[Any],
        mlp: Sequence[Any],
    ) -> None:
        """`norms`: before attention (not where the caller does it, see `forward_normed`) and before the MLP.

        `attention`: projections of queries, keys, values and output; `mlp`: gate, up, down.
        """
        super().__init__()
        self.layer_idx, self.head_dim, self.scale = layer_idx, head_dim, scale
        self.input_norm, self.mlp_norm = norms
        self.qkv, self.out = PackedLinear.joined(attention[:3]), PackedLinear.joined(attention[3:])
        self.gate_up, self.down = PackedLinear.joined(mlp[:2]), PackedLinear.joined(mlp[2:])
        self.num_queries: int = attention[0].out_features // head_dim
        self.num_keys: int = attention[1].out_features // head_dim

    @staticmethod
    def of_llama(layer: Any) -> FusedDecoderLayer:
        """From a layer of transformers' Llama."""
        attention, mlp = layer.self_attn, layer.mlp
        norms = [
            Norm.of(n.weight, n.variance_epsilon) for n in (layer.input_layernorm, layer.post_attention_layernorm)
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
        self, residual: Tensor, normed: Tensor, cos_sin: tuple[Tensor, Tensor], context: AttentionContext
    ) -> Tensor:
        """The layer after its first norm: `normed` [B, S, X] is what the projections read, `residual` [B, S, H] is
        what the results are added to, `cos_sin` are the rotary tables [B, S, D].
        """
        qkv = self.qkv(normed)
        if isinstance(context, PagedContext) and context.in_rows:
            mixed = context.rotate_and_attend(self.layer_idx, qkv, context.widened(*cos_sin), self.scale)
        else:
            heads_BSND = qkv.unflatten(-1, (-1, self.head_dim))
            rotated = rotate(heads_BSND[..., : self.num_queries + self.num_keys, :], *cos_sin)
            query, key = (
                rotated[..., : self.num_queries, :].transpose(1, 2),
                rotated[..., self.num_queries :, :].transpose(1, 2),
            )
            value = heads_BSND[..., self.num_queries + self.num_keys :, :].transpose(1, 2)
            mixed = context.attend(self.layer_idx, query, key, value, self.scale).flatten(-2)
        hidden, normed = op.add_norm(residual, self.out(mixed), self.mlp_norm.weight, self.mlp_norm.eps)
        return self.down.add_to(op.silu_mul(self.gate_up(normed)), hidden)


def fits(layer: Any) -> bool:
    """Whether `FusedDecoderLayer` computes what this layer does."""
    if type(layer).__name__ not in SUPPORTED or not all(
        is_plain(module) for module in layer.modules() if hasattr(module, "in_features")
    ):
        return False
    return type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
