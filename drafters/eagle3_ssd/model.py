"""The EAGLE-3 drafter in plain torch, single-device and mode-free: attention is passed in, and nothing here asks
whether it is training.

Training replaces norms, gated activations and rotations by compiled twins (`train.objective.accelerate`); serving
packs the weights into layers of its own (`infer.draft.model`).

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
from infer.kernels.decoder_layer.reference import rms_norm, rotate

NUM_TAPS = 3


class Attend(Protocol):
    """Attention over whatever keys the caller makes visible, its own past and the given ones. Queries and keys are
    already rotated.
    """

    def __call__(self, layer_index: int, query_BSND: Tensor, key_BSMD: Tensor, value_BSMD: Tensor, /) -> Tensor: ...


class Rotary(NamedTuple):
    """Cosines and sines of the slots' positions, fp32 [B, S, D] each, first half of D equal to the second."""

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
    both_halves = torch.cat((angles, angles), dim=-1)
    factor = rope.attention_factor
    return Rotary(both_halves.cos() * factor, both_halves.sin() * factor)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and rotation; what a query sees is up to `attend`."""

    def __init__(self, config: DrafterConfig, layer_index: int, input_size: int) -> None:
        super().__init__()
        self.layer_index, self.head_dim = layer_index, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos_sin: Rotary, attend: Attend) -> Tensor:
        """[B, S, input size] -> [B, S, H]."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_BSND = attend(self.layer_index, self.rotate(query, cos_sin), self.rotate(key, cos_sin), value)
        return self.o_proj(mixed_BSND.flatten(-2))

    def rotate(self, x_BSXD: Tensor, cos_sin: Rotary) -> Tensor:
        """Queries or keys rotated by their positions; a method of its own, so that training can replace it."""
        return rotate(x_BSXD, *cos_sin)


class MLP(nn.Module):
    """Gated MLP of a Llama layer (SwiGLU)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up; a method of its own, so that training can replace it."""
        return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """An ordinary Llama decoder layer: the drafter's second layer and those above it."""

    def __init__(self, config: DrafterConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos_sin: Rotary, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos_sin, attend)
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

    def forward(self, embeds: Tensor, features: Tensor, cos_sin: Rotary, attend: Attend) -> Tensor:
        both = torch.cat((self.input_layernorm(embeds).to(features.dtype), self.hidden_norm(features)), dim=-1)
        hidden = features + self.self_attn(both, cos_sin, attend)
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
        cos_sin = rotary(positions_BS, self.config.rope)
        features_BSH = features_BSH if self.feature_norm is None else self.feature_norm(features_BSH)
        hidden = self.midlayer(embeds_BSH, features_BSH, cos_sin, attend)
        for layer in self.layers.values():
            hidden = layer(hidden, cos_sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden

    def head_input(self, hidden: Tensor) -> Tensor:
        """What `lm_head` reads of an output of `forward`, [..., H]: its norm, unless that has been applied already."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """An output of `forward` [..., H] to logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.head_input(hidden))


def _nan(*size: int) -> Tensor:
    return torch.full(size, torch.nan)
