"""Log-probabilities of committed tokens: of the target's own logits, before bias, penalties, temperature and filters.

R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.sampling.saguaro import top_f
from infer.kernels.sampling.verdict import TokenLogprob


def token_logprobs(logits_RV: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """What the target gave each of `tokens`, one per row, and the `count` likeliest of each row (equal ones by lower
    id).

    Under speculation row j follows the first j drafted tokens, so these are the numbers of plain decoding.
    """
    assert len(tokens) == len(logits_RV), (len(tokens), logits_RV.shape)
    logits_RV = logits_RV.float()
    totals_R1 = logits_RV.logsumexp(-1, keepdim=True)
    chosen = (logits_RV.gather(-1, torch.tensor(tokens, device=logits_RV.device)[:, None]) - totals_R1)[:, 0].tolist()
    ids_RN = top_f(logits_RV, count)
    values_RN = logits_RV.gather(-1, ids_RN) - totals_R1
    tops = [
        tuple(zip(ids, values, strict=True)) for ids, values in zip(ids_RN.tolist(), values_RN.tolist(), strict=True)
    ]
    return tuple(TokenLogprob(*row) for row in zip(tokens, chosen, tops, strict=True))
