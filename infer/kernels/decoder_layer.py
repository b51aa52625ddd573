"""A Llama decoder layer in half the operations, put in the place of transformers' own at load (`drafters.targets`).

At batch 1 on CPU a layer is a stream of small operations between four reads of the weights, and each costs ten microseconds or
more. The arithmetic is the layer's; it rounds fewer intermediate results to the model's dtype.

B batch, S rows, H hidden size, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.kernels.linear import PackedLinear
from infer.kernels.paged_attention import AttentionContext

SUPPORTED = ("LlamaDecoderLayer",)


def rms_norm_reference(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Plain twin of `RmsNorm`: x / sqrt(mean(x^2) + eps) * weight, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight_H.float()).to(x.dtype)


class RmsNorm(nn.Module):
    """RMS norm by way of the fused layer norm: over [x, -x] the mean is 0 and the variance is mean(x^2)."""

    def __init__(self, weight_H: Tensor, eps: float) -> None:
        super().__init__()
        self.size, self.eps = len(weight_H), eps
        self.doubled = torch.cat([weight_H, weight_H]).detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        both = torch.cat([x, -x], dim=-1)
        return F.layer_norm(both, (2 * self.size,), self.doubled, None, self.eps)[..., : self.size]


class FusedDecoderLayer(nn.Module):
    """Takes the weights of a transformers layer; called as that one is, with attention through `context`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.input_norm, self.mlp_norm = (_norm(n) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        self.qkv, self.out = _fused(attention.q_proj, attention.k_proj, attention.v_proj), _fused(attention.o_proj)
        self.gate_up, self.down = _fused(mlp.gate_proj, mlp.up_proj), _fused(mlp.down_proj)
        queries: int = attention.q_proj.out_features
        keys: int = attention.k_proj.out_features
        self.heads = [queries // self.head_dim, keys // self.head_dim, keys // self.head_dim]
        self.mlp_size: int = mlp.up_proj.out_features

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], context: AttentionContext, **_: object
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]; `position_embeddings` are transformers' cosines and sines, [B, S, D]."""
        num_queries, num_keys, _values = self.heads
        heads_BSND = self.qkv(self.input_norm(hidden_states)).unflatten(-1, (-1, self.head_dim))
        turned = rotate(heads_BSND[..., : num_queries + num_keys, :], *position_embeddings)
        query, key = turned[..., :num_queries, :].transpose(1, 2), turned[..., num_queries:, :].transpose(1, 2)
        mixed = context.attend(self.layer_idx, query, key, heads_BSND[..., num_queries + num_keys :, :].transpose(1, 2), self.scale)
        hidden_states = hidden_states + self.out(mixed.flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(hidden_states)).split(self.mlp_size, dim=-1)
        return hidden_states + self.down(F.silu(gate) * up)


def rotate(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Half-rotation by position: x * cos + [-second half, first half] * sin, with one roll instead of two slices and a cat."""
    half = x_BSND.shape[-1] // 2
    signed = torch.cat([-sin_BSD[..., :half], sin_BSD[..., half:]], dim=-1)[:, :, None]
    return torch.addcmul(x_BSND * cos_BSD[:, :, None], x_BSND.roll(half, -1), signed)


def fits(layer: Any) -> bool:
    """Whether `FusedDecoderLayer` computes what this layer does."""
    if type(layer).__name__ not in SUPPORTED:
        return False
    return type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _norm(norm: Any) -> RmsNorm:
    return RmsNorm(norm.weight, norm.variance_epsilon)


def _fused(*layers: nn.Linear) -> PackedLinear:
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return PackedLinear(weight, bias)
