"""Paged attention in plain torch: a softmax for each row and head over the slots that the row sees.

The truth that `sdpa` and `cpu` are tested against. R query rows of all requests, Q rows and L keys of one request, N
query heads, M key/value heads, D head size, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import PagedRequest


def attend(
    query_RND: Tensor,
    key_RMD: Tensor,
    value_RMD: Tensor,
    pool: KvPool,
    layer: int,
    requests: Sequence[PagedRequest],
    scale: float,
) -> Tensor:
    """Write the new keys and values of a layer, then let each row read its own request's: [R, N, D].

    Rows stand request by request, each request's at the end of its keys. A row sees what its request's mask shows it;
    without a mask the keys up to its own.
    """
    keys, values = pool.keys[layer], pool.values[layer]
    out, start = torch.empty_like(query_RND), 0
    for request in requests:
        rows, length = request.num_rows, request.num_keys
        slots = torch.tensor(pool.slots(request.blocks, 0, length))
        part = slice(start, start + rows)
        keys[slots[length - rows :]], values[slots[length - rows :]] = key_RMD[part], value_RMD[part]
        for q in range(rows):
            seen = slots[: length - rows + q + 1] if request.mask_QL is None else slots[request.mask_QL[q]]
            out[start + q] = attend_one(query_RND[start + q], keys[seen], values[seen], scale)
        start += rows
    return out


def attend_one(query_ND: Tensor, keys_LMD: Tensor, values_LMD: Tensor, scale: float) -> Tensor:
    """Attention of one row over the keys it sees, in fp32: query head n reads key head n // (N / M), [N, D]."""
    groups = query_ND.shape[0] // keys_LMD.shape[1]
    keys, values = (side.float().repeat_interleave(groups, dim=1) for side in (keys_LMD, values_LMD))
    weights_NL = (torch.einsum("nd,lnd->nl", query_ND.float(), keys) * scale).softmax(-1)
    return torch.einsum("nl,lnd->nd", weights_NL, values).to(query_ND.dtype)
