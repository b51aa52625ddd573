"""From adjusted logits to tokens: a request's distribution (temperature, min-p, top-k, top-p), and draws by inverse
CDF.

R rows, V vocabulary (the target's or the drafter's), N blocks of W entries of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.sampling.params import Sampling

_NUCLEUS = (256, 4096)  # candidates sorted for top-p where top-k names no number; for a larger nucleus the whole row
_BLOCK = 128  # entries per block of the two-level inverse CDF


def greedy_ids(logits_RV: Tensor) -> list[int]:
    """The argmax of each row; of equal logits the lowest id.

    On CPU numpy does it: torch's argmax is not vectorised there and takes 20 times as long (0.84 ms for 6 x 49152 in
    fp32).
    """
    if logits_RV.device.type != "cpu":
        return logits_RV.argmax(-1).tolist()
    return logits_RV.detach().float().numpy().argmax(-1).tolist()


def process_logits(logits_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Logits to the distribution a request samples from: temperature, min-p, top-k, top-p, in this order. fp32 [R, V],
    rows sum to 1.

    min-p drops tokens less likely than this share of the likeliest one. top-p keeps the smallest set of likeliest
    tokens that reaches this share of what min-p and top-k left. Tokens as likely as the last one kept are kept too. A
    row depends on its own logits and settings only. Greedy rows have no distribution here: see `greedy_ids`.
    """
    assert len(sampling) == len(logits_RV), (len(sampling), logits_RV.shape)
    assert not any(row.greedy for row in sampling), (
        "greedy rows take the argmax, they are not sampled at a tiny temperature"
    )
    temperatures_R = torch.tensor([row.temperature for row in sampling], dtype=torch.float32, device=logits_RV.device)
    logits_RV = logits_RV.float()
    # The maximum goes first: a tiny temperature then underflows to a one-hot instead of overflowing. From here on in
    # place: fresh megabytes cost more in page faults than the arithmetic on them.
    weights_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).div_(temperatures_R[:, None]).exp_()
    for weights_V, row in zip(weights_RV, sampling, strict=True):
        if row.min_p > 0.0:
            weights_V.masked_fill_(weights_V < row.min_p, 0.0)  # the likeliest one weighs 1
        if row.top_k is not None or row.top_p < 1.0:
            weights_V.masked_fill_(weights_V < _smallest_kept(weights_V, row), 0.0)
    return weights_RV.div_(weights_RV.sum(-1, keepdim=True))


def sample_from(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Draw one id per row with probability proportional to `weights_RV` (>= 0, one positive at least per row): int64
    [R].

    Inverse CDF: the first token whose cumulative weight exceeds u times the total. A token of weight 0 is never
    returned, at u = 0 and at u -> 1 neither. Two levels (blocks, then inside one block) keep the exact fp64 sums
    short.
    """
    rows, size = weights_RV.shape
    width = math.gcd(size, _BLOCK)
    blocks_RNW = weights_RV.unflatten(-1, (size // width, width))
    mass_RN = blocks_RNW.sum(-1).double()
    targets_R = uniforms_R.to(mass_RN) * mass_RN.sum(-1)
    block_R, rest_R = _first_above(mass_RN, targets_R)
    inside_RW = blocks_RNW[torch.arange(rows, device=weights_RV.device), block_R].double()
    return block_R * width + _first_above(inside_RW, rest_R)[0]


def _first_above(weights_RN: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first positive entry whose cumulative weight exceeds the target, and what is left of the target inside it.

    Where rounding leaves no such entry, the last positive one.
    """
    ends_RN = weights_RN.cumsum(-1)
    positive_RN = weights_RN > 0
    above_RN = positive_RN & (ends_RN > targets_R[:, None])
    last_R = weights_RN.shape[-1] - 1 - positive_RN.flip(-1).int().argmax(-1)
    index_R = torch.where(above_RN.any(-1), above_RN.int().argmax(-1), last_R)
    at_R1 = index_R[:, None]
    start_R = (ends_RN.gather(-1, at_R1) - weights_RN.gather(-1, at_R1)).squeeze(-1)
    return index_R, targets_R - start_R


def _smallest_kept(weights_V: Tensor, row: Sampling) -> Tensor:
    """The smallest weight that top-k and top-p let through."""
    size = len(weights_V)
    total = weights_V.sum(dtype=torch.float64) if row.top_k is None else None
    values_N, needed = weights_V[:0], weights_V.new_zeros(())
    counts = [count for count in _NUCLEUS if 4 * count <= size] + [
        size
    ]  # of more than a quarter it is as quick to sort all
    for count in counts if row.top_k is None else [row.top_k]:
        values_N = weights_V.topk(min(count, size)).values.double()
        needed = row.top_p * (values_N.sum() if total is None else total)
        if bool(values_N.sum() >= needed):
            break
    return values_N[-1] if row.top_p == 1.0 else values_N[(values_N.cumsum(-1) - values_N < needed).sum() - 1]
