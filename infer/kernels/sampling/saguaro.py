"""Saguaro sampling (arXiv 2603.03251, section 4; infer/draft/README.md, section 2): draft less of the tokens that the
speculation cache prepares for, so that rejections land on them.

R rows, D draft vocabulary, F tokens whose weight is lowered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from infer.kernels.sampling import reference

_SLACK = 8  # candidates fetched beyond F, so that ties at the boundary can be ordered without sorting the whole row


class Tilted(NamedTuple):
    """q' = sigma_{F,C}(q), and the tokens whose weight was lowered, likeliest under q first (none when q' = q)."""

    probs_RD: Tensor
    lowered_RF: Tensor


def top_f(scores_RD: Tensor, count: int) -> Tensor:
    """The `count` best entries of each row, best first, equal scores by lower id: int64 [R, min(count, D)].

    The one place where ties are broken: Saguaro sampling and the choice of outcomes have to agree on who is in the top
    F.
    """
    size = scores_RD.shape[-1]
    count = min(count, size)
    if count == 0:
        return torch.empty(len(scores_RD), 0, dtype=torch.int64, device=scores_RD.device)
    fetched = min(count + _SLACK, size)
    values_RC, ids_RC = scores_RD.topk(fetched)
    if fetched < size and bool((values_RC[:, count - 1] == values_RC[:, -1]).any()):
        return reference.top_f(scores_RD, count)  # more equal scores at the boundary than were fetched
    by_id_RC = ids_RC.argsort(-1)
    ids_RC = ids_RC.gather(-1, by_id_RC)
    by_score_RC = values_RC.gather(-1, by_id_RC).sort(dim=-1, descending=True, stable=True).indices
    return ids_RC.gather(-1, by_score_RC)[:, :count]


def tilt(probs_RD: Tensor, fan_out: int, c: float) -> Tilted:
    """sigma_{F,C}: multiply the probabilities of the top `fan_out` tokens of each row by `c` and renormalise.

    `c` in (0, 1]; 1 changes nothing. `fan_out` is the F_{m-1} of the place m being drafted, the same for all branches
    at one depth. The result is what has to be sampled from and sent: verification takes it bit for bit.
    """
    assert 0.0 < c <= 1.0, f"saguaro_c = {c} has to lie in (0, 1]"
    lowered_RF = top_f(probs_RD, fan_out if c < 1.0 else 0)
    if lowered_RF.shape[-1] == 0:
        return Tilted(probs_RD, lowered_RF)
    tilted_RD = probs_RD.scatter(-1, lowered_RF, probs_RD.gather(-1, lowered_RF) * c)
    return Tilted(tilted_RD / tilted_RD.sum(-1, keepdim=True), lowered_RF)
