"""The EAGLE-3 drafter, single-device and mode-free: attention is passed in, and nothing here asks whether it is
training.

Shapes: B batch, S slots, H drafter hidden size, N query heads, M key-value heads, D head dimension, Vd draft
vocabulary, Ht target's hidden size.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.rope import Rope, RopeScaling
from train.ops import cpu_train

NUM_TAPS = 3


class Attend(Protocol):
    """Attention over whatever keys the caller makes visible, its own past and the given ones. Queries and keys are
    already rotated.
    """

    def __call__(self, layer_index: int, query_BSND: Tensor, key_BSMD: Tensor, value_BSMD: Tensor, /) -> Tensor: ...


class Rotary(NamedTuple):
    """Cosines and sines, fp32 [B, S, 1, D], first half of D equal to the second."""

    cos: Tensor
    sin: Tensor


@lru_cache(maxsize=16)
def inverse_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """fp32 [D/2]: theta^(-2i/D), stretched where the config says so, in transformers' order of operations."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64, device=device).float() / rope.head_dim
        periods = rope.theta**exponents
        return 1.0 / periods if rope.scaling is None else SCALINGS[rope.scaling.rope_type](periods, rope, rope.scaling)


def _linear(periods: Tensor, _: Rope, scaling: RopeScaling) -> Tensor:
    return 1.0 / periods / scaling.factor


def _llama3(periods: Tensor, _: Rope, scaling: RopeScaling) -> Tensor:
    """Waves longer than the old context divided by `low_freq_factor` are stretched, short ones kept, those between
    blended.
    """
    low, high, old = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and old is not None, scaling
    plain = 1.0 / periods
    wavelength = 2 * math.pi / plain
    outer = torch.where(wavelength > old / low, plain / scaling.factor, plain)
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * outer / scaling.factor + smooth * outer
    between = (wavelength >= old / high) & (wavelength <= old / low)
    return torch.where(between, blended, outer)


def _yarn(periods: Tensor, rope: Rope, scaling: RopeScaling) -> Tensor:
    """Dimensions that turn often in the old context are kept, slow ones stretched, with a linear ramp between (arXiv
    2309.00071).
    """
    old = scaling.original_max_position_embeddings
    assert old is not None, scaling

    def dimension(turns: float) -> float:
        return rope.head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.beta_fast or 32), dimension(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.head_dim - 1)
    width = (last - first) or 0.001
    places = torch.arange(len(periods), dtype=torch.float32, device=periods.device)
    kept = 1 - ((places - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def rotary(positions_BS: Tensor, rope: Rope) -> Rotary:
    """Rotary tables at the given positions, in fp32 whatever the model's dtype."""
    angles = positions_BS[..., None].float() * inverse_frequencies(rope, positions_BS.device)
    both_halves = torch.cat((angles, angles), dim=-1)[:, :, None, :]
    factor = rope.attention_factor
    return Rotary(both_halves.cos() * factor, both_halves.sin() * factor)


def rotate(x_BSXD: Tensor, table: Rotary) -> Tensor:
    """Rotate queries or keys by their positions: half-rotation, the convention of transformers' Llama."""
    if cpu_train.available(x_BSXD) and x_BSXD.shape[:2] == table.cos.shape[:2]:
        return cpu_train.rotate(x_BSXD, table.cos, table.sin)
    first, second = x_BSXD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BSXD * table.cos + turned * table.sin).to(x_BSXD.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if cpu_train.available(x) and self.weight.dtype == torch.float32:
            return cpu_train.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, layer_index: int, input_size: int) -> None:
        super().__init__()
        self.layer_index, self.head_dim = layer_index, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, table: Rotary, attend: Attend) -> Tensor:
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_BSND = attend(self.layer_index, rotate(query, table), rotate(key, table), value)
        return self.o_proj(mixed_BSND.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(cpu_train.silu_mul(gate, up) if cpu_train.available(gate) else F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """An ordinary Llama decoder layer: the drafter's second layer and those above it."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, table: Rotary, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), table, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MidLayer(nn.Module):
    """The first layer: attends over [norm(embedding), norm(feature)], with the feature as its residual stream."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 0, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embeds: Tensor, features: Tensor, table: Rotary, attend: Attend) -> Tensor:
        both = torch.cat((self.input_layernorm(embeds).to(features.dtype), self.hidden_norm(features)), dim=-1)
        hidden = features + self.self_attn(both, table, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(nn.Module):
    """Predicts, at slot j, the token two places on from the embedding of token j+1 and the feature of position j
    (`align.py`).

    Parameters carry the names of the EAGLE-3 checkpoint. `embed_tokens` is the target's and starts as NaN, so that an
    embedding never loaded shows at once.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=_nan(config.vocab_size, config.hidden_size)
        )
        self.embed_tokens.weight.requires_grad_(False)
        self.own_embeddings = (
            False  # set where the drafter was read with embeddings in its file: they need not be the target's
        )
        eps, taps = (
            config.rms_norm_eps,
            (RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(NUM_TAPS)),
        )
        self.fc_norm = nn.ModuleList(taps) if config.fc_norm else None
        self.fc = nn.Linear(NUM_TAPS * config.target_hidden_size, config.hidden_size, bias=False)
        self.feature_norm = RMSNorm(config.hidden_size, eps) if config.feature_norm else None
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleDict(
            {str(index): DecoderLayer(config, index) for index in range(1, config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def fuse(self, taps: Tensor) -> Tensor:
        """Three concatenated taps [..., 3 Ht] to one feature [..., H]; runs on the target's side."""
        if self.fc_norm is not None:
            each = taps.unflatten(-1, (NUM_TAPS, -1)).unbind(-2)
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(taps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] of the target's vocabulary to embeddings [..., H]."""
        return self.embed_tokens(token_ids)

    def forward(self, embeds_BSH: Tensor, features_BSH: Tensor, positions_BS: Tensor, attend: Attend) -> Tensor:
        """One drafter step over S slots; returns [B, S, H]: feed it back as a feature, or read `logits` off it.

        The first layer adds to the feature, so without `feature_norm` the scale of what is fed back drifts with every
        step.
        """
        table = rotary(positions_BS, self.config.rope)
        features_BSH = features_BSH if self.feature_norm is None else self.feature_norm(features_BSH)
        hidden = self.midlayer(embeds_BSH, features_BSH, table, attend)
        for layer in self.layers.values():
            hidden = layer(hidden, table, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def head_input(self, hidden: Tensor) -> Tensor:
        """What `lm_head` reads, [..., H], of an output of `forward`: its norm, unless that has been applied already."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """An output of `forward` [..., H] to logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.head_input(hidden))


def _nan(*size: int) -> Tensor:
    return torch.full(size, torch.nan)
