"""Attention over keys of a pool by torch's own kernel: the rows of one request, or of several in one call.

R query rows of all requests, B requests, Q rows and L keys of one request, N query heads, M key heads, G = N / M, X =
G * Q, D head size, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_PADDING = 2.0  # products of padded requests, to those needed: beyond it one call costs more than several


def attend_rows(query_QND: Tensor, keys_LMD: Tensor, values_LMD: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of Q rows over L keys, [Q, N, D]. `bias` [G*Q, L] is added to the scores (`additive_mask`), None shows
    all.

    The G query heads that share a key head are laid out as G*Q rows of it, so that keys are never repeated.
    """
    rows, _, head = query_QND.shape
    kv_heads = keys_LMD.shape[1]
    query_MXD = query_QND.reshape(rows, kv_heads, -1, head).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head)
    keys, values = keys_LMD.transpose(0, 1)[None], values_LMD.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(query_MXD, keys, values, attn_mask=bias, scale=scale)
    return out.view(kv_heads, -1, rows, values.shape[-1]).permute(2, 0, 1, 3).reshape(rows, -1, values.shape[-1])


def are_alike(shapes: Sequence[tuple[int, int]]) -> bool:
    """Whether requests of these numbers of rows and keys are computed faster in one call than one by one."""
    rows, keys = zip(*shapes, strict=True)
    return len(shapes) > 1 and len(shapes) * max(rows) * max(keys) <= MOST_PADDING * sum(r * k for r, k in shapes)


class Padded(NamedTuple):
    """B requests as one batch of Q rows and L keys, those of the longest; what is padding is seen by nobody or not
    read.
    """

    slots_BL: Tensor
    visible_BQL: Tensor
    rows_BQ: Tensor  # which of the R rows is the query there
    places_R: Tensor  # where each of the R rows is among the B * Q
    biases: dict[int, Tensor]  # by the number of query heads that share a key head: what is added to the scores

    @staticmethod
    def of(
        shapes: Sequence[tuple[int, int]],
        reads: Sequence[slice | Tensor],
        masks: Sequence[Tensor | None],
        device: torch.device,
    ) -> Padded:
        """Of each request its number of rows and keys, the slots of its keys, and its own mask (None is causal).

        Rows stand at the beginning of their Q, keys at the beginning of their L. A padding row sees what its request's
        last one sees.
        """
        rows_B, keys_B = torch.tensor(shapes).unbind(1)
        most_rows, most_keys = int(rows_B.max()), int(keys_B.max())
        place_Q, key_L = torch.arange(most_rows), torch.arange(most_keys)
        row_BQ = torch.minimum(place_Q, rows_B[:, None] - 1)  # among the request's own
        visible_BQL = key_L <= ((keys_B - rows_B)[:, None] + row_BQ)[:, :, None]
        slots_BL = torch.zeros(len(shapes), most_keys, dtype=torch.int64)
        for i, ((rows, keys), read, mask_QL) in enumerate(zip(shapes, reads, masks, strict=True)):
            slots_BL[i, :keys] = torch.arange(read.start, read.stop) if isinstance(read, slice) else read
            if mask_QL is not None:
                visible_BQL[i, :rows, :keys] = mask_QL
        starts_B = rows_B.cumsum(0) - rows_B
        rows_BQ = starts_B[:, None] + row_BQ
        places_R = (place_Q < rows_B[:, None]).flatten().nonzero()[:, 0]
        return Padded(slots_BL.to(device), visible_BQL.to(device), rows_BQ.to(device), places_R.to(device), {})

    def bias(self, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, G * Q, L]; made once for all layers."""
        if groups not in self.biases:
            self.biases[groups] = as_bias(self.visible_BQL, dtype).repeat(1, groups, 1)[:, None]
        return self.biases[groups]


def attend_padded(query_RND: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Padded) -> Tensor:
    """One gathering and one call for all requests; heads are laid out as in `attend_rows`."""
    (count, rows), longest = batch.rows_BQ.shape, batch.slots_BL.shape[1]
    kv_heads, head = keys.shape[1:]
    slots = batch.slots_BL.flatten()
    key_BMLD, value_BMLD = (
        side.index_select(0, slots).view(count, longest, kv_heads, -1).transpose(1, 2) for side in (keys, values)
    )
    query_BQMGD = query_RND.index_select(0, batch.rows_BQ.flatten()).view(count, rows, kv_heads, -1, head)
    query_BMXD = query_BQMGD.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, head)
    bias = batch.bias(query_BMXD.shape[2] // rows, query_RND.dtype)
    out = F.scaled_dot_product_attention(query_BMXD, key_BMLD, value_BMLD, attn_mask=bias, scale=scale)
    value = values.shape[2]
    out_XND = out.view(count, kv_heads, -1, rows, value).permute(0, 3, 1, 2, 4).reshape(count * rows, -1, value)
    return out_XND.index_select(0, batch.places_R)


def causal_mask(rows: int, keys: int, device: torch.device) -> Tensor:
    """[rows, keys] bool: the rows are the last ones of `keys`, and each sees itself and what is before it."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)


def additive_mask(visible_QL: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The bias for `attend_rows`: 0 where visible, -inf elsewhere, repeated for the G heads of a group, [G*Q, L]."""
    return as_bias(visible_QL, dtype).repeat(groups, 1)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
