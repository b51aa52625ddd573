"""How a transformers model gets its attention from here: `attend_in_context`, and the context that each forward is
given.

`attend_in_context` has the signature of transformers' attention functions (`drafters.targets.target` registers it);
the keyword argument `context`, given to the model's forward, says what a query row may see. Some models' layers do not
hand such arguments on to their attention; for those `CURRENT` holds the context of the forward. Two contexts exist:
`paged.PagedContext` (serving: rows of several requests behind each other, keys in a pool) and `DocumentContext`
(features: packed rows, attention stays inside a document).

B batch, T positions, R rows, N query heads, M key/value heads, D head size.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.attention.sdpa import as_bias

# What a transformers layer may ask of its attention function, beside the scale, that is not computed here.
NOT_COMPUTED = ("sliding_window", "softcap", "s_aux")


class AttentionContext(Protocol):
    """What a model's forward is given as `context=`: computes one layer's attention."""

    def attend(self, layer: int, query_1NRD: Tensor, key_1MRD: Tensor, value_1MRD: Tensor, scale: float) -> Tensor:
        """Return the attended values, [batch, rows, N, D]."""
        ...


CURRENT: ContextVar[AttentionContext | None] = ContextVar("CURRENT", default=None)  # of this thread's forward


@dataclass(frozen=True)
class DocumentContext:
    """Attention inside packed rows [B, T]: a position sees the earlier ones of its own document."""

    document_ids_BT: Tensor

    def attend(self, layer: int, query_1NRD: Tensor, key_1MRD: Tensor, value_1MRD: Tensor, scale: float) -> Tensor:
        """See `AttentionContext.attend`; here the batch is B."""
        ids = self.document_ids_BT
        visible = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
        bias = as_bias(visible, query_1NRD.dtype)
        out = F.scaled_dot_product_attention(
            query_1NRD, key_1MRD, value_1MRD, attn_mask=bias, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)


def attend_in_context(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    context: AttentionContext | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """The attention function of a transformers layer: hands its rotated rows to the forward's context, which came down
    through the layers or is the `CURRENT` one.
    """
    context = context or CURRENT.get()
    assert context is not None, "a forward without a context"
    assert attention_mask is None, "attention with a mask of the model's own is not computed here"
    unknown = {name: extra[name] for name in NOT_COMPUTED if extra.get(name) is not None}
    assert not unknown, f"attention with {unknown} is not computed here; drafters.targets.support refuses such targets"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return context.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]
