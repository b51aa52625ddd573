"""From a target's last hidden state to its logits, the one way for serving, features and training.

Most targets multiply by their output head and are done. Some add a bias (Phi), scale what comes out (Granite, Cohere,
MiniCPM3, Falcon-H1), or soft-cap it (Gemma 2). `HeadLaw` says which; `find_law` finds it from one forward.

P positions, H target hidden size, V vocabulary or a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SCALING = ("logit", "lm_head_mult", "output_mult")  # a config field so named may multiply or divide the logits
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest logit


class HeadLaw(NamedTuple):
    """What is done to the head's output: softcap * tanh(scale * z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def of(self, logits: Tensor) -> Tensor:
        """The same shape and dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class TargetHead(nn.Module):
    """The head with its law: [..., H] -> [..., V]. `rows` makes one of some tokens, for the trainer."""

    def __init__(
        self, weight_VH: Tensor, bias_V: Tensor | None = None, law: HeadLaw | None = None, linear: Any = None
    ) -> None:
        """`linear`: a faster or quantised module with the same weight and bias, for serving."""
        super().__init__()
        self.law = law or HeadLaw()
        self.register_buffer("weight", weight_VH, persistent=False)
        self.register_buffer("bias", bias_V, persistent=False)
        self.weight: Tensor
        self.bias: Tensor | None
        self._linear = [linear]  # in a list, so that it is not registered twice

    @property
    def is_plain(self) -> bool:
        """Whether logits are the product with the weight and nothing else."""
        return self.law == HeadLaw() and self.bias is None

    def __len__(self) -> int:
        return len(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits, in the dtype of `hidden`."""
        if (linear := self._linear[0]) is not None:
            return self.law.of(linear(hidden))
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return self.law.of(F.linear(hidden, self.weight.to(hidden.dtype), bias))

    def bare(self) -> TargetHead:
        """The same head without the module that serves it."""
        return TargetHead(self.weight, self.bias, self.law)

    def rows(self, ids_V: Tensor) -> TargetHead:
        """The head of some tokens only, in memory of its own."""
        bias = None if self.bias is None else self.bias[ids_V].clone()
        return TargetHead(self.weight[ids_V].clone(), bias, self.law)


def find_law(config: Any, plain_PV: Tensor, logits_PV: Tensor) -> HeadLaw | None:
    """The law that makes the model's own `logits` of the head's output `plain`; None where no field of the config
    explains them.

    Granite-like, logits_scaling = 8, plain [[8., -16.]], logits [[1., -2.]]: HeadLaw(scale=0.125).
    """
    if plain_PV.shape != logits_PV.shape:
        return None
    plain, logits = plain_PV.float(), logits_PV.float()
    allowed = CLOSE[plain_PV.dtype] * float(logits.abs().max()) if plain_PV.dtype in CLOSE else 0.0
    for law in _candidates(config):
        if float((law.of(plain) - logits).abs().max()) <= allowed:
            return law
    return None


def _candidates(config: Any) -> Iterator[HeadLaw]:
    """Softcaps that the config names first, each with every scale that its fields may mean."""
    fields = {
        name: float(value)
        for name, value in config.to_dict().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value
    }
    caps = [value for name, value in fields.items() if "softcap" in name or "soft_cap" in name]
    named = [value for name, value in fields.items() if any(part in name for part in SCALING)]
    scales = [1.0, *named, *(1.0 / value for value in named)]
    if "dim_model_base" in fields:  # MiniCPM's heads read hidden / (hidden_size / dim_model_base)
        scales.append(fields["dim_model_base"] / fields["hidden_size"])
    for cap in (*caps, None):
        for scale in scales:
            yield HeadLaw(scale, cap)
