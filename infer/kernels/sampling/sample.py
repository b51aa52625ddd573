"""Randomness keyed by (seed, position, purpose), a request's own processing of logits, and draws by inverse CDF.

R rows, V vocabulary (the target's or the drafter's), N blocks of W entries of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_NUCLEUS = (256, 4096)  # candidates sorted for top-p where top-k names no number; for a larger nucleus the whole row
_BLOCK = 128  # entries per block of the two-level inverse CDF


class Purpose(IntEnum):
    """What a number is drawn for. Each purpose has its own stream."""

    DRAFT = 1
    ACCEPT = 2
    BONUS = 3  # the token after the accepted ones, from the residual or from p_K


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen. `temperature` 0 is greedy: the argmax of the logits after bias and
    penalties.

    Bias and penalties change the logits first (`infer.kernels.sampling.adjust`); temperature, min-p, top-k and top-p
    make them a distribution (`process_logits`).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each token once
    grammar: str | None = None  # what it refuses is masked, after bias and penalties (`infer.text.grammar`)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the text so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before anything is drawn."""
        return self.penalised or bool(self.logit_bias) or self.grammar is not None


def uniform(seed: int, position: int, purpose: Purpose, place: int = 0) -> float:
    """A number in [0, 1) that depends on nothing but its four keys (53 bits; splitmix64, chained over the keys).

    `position` is the absolute position of the token that the draw decides. `place` is the distance to the last
    committed token and is given for `DRAFT` only: a position may be drafted again after a rejection, and whether a
    look-up hits may depend on the tokens drafted there before. With the place in the key a token that is served never
    reuses a number that was used before.
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ (position & _MASK))
    state = _mix(state ^ (int(purpose) | place << 8))
    return (state >> 11) * 2.0**-53


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, places: Sequence[int] | None = None
) -> Tensor:
    """`uniform` row by row: fp64 [R]."""
    assert len(seeds) == len(positions), (len(seeds), len(positions))
    values = [uniform(s, p, purpose, m) for s, p, m in zip(seeds, positions, places or [0] * len(seeds), strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` to a prompt that is to be answered several times: for the first one `seed` itself."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) ^ index) >> 1


def greedy_ids(logits_RV: Tensor) -> list[int]:
    """The argmax of each row; of equal logits the lowest id.

    On CPU numpy does it: torch's argmax is not vectorised there and takes 20 times as long (0.84 ms for 6 x 49152 in
    fp32).
    """
    if logits_RV.device.type != "cpu":
        return logits_RV.argmax(-1).tolist()
    return logits_RV.detach().float().numpy().argmax(-1).tolist()


def process_logits_reference(logits_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Plain twin of `process_logits`: softmax and a full sort of each row."""
    rows = []
    for logits_V, row in zip(logits_RV.float(), sampling, strict=True):
        probs_V = (logits_V / row.temperature).softmax(-1)
        probs_V = torch.where(probs_V >= row.min_p * probs_V.max(), probs_V, 0.0)
        values = probs_V.sort(descending=True).values.tolist()[: row.top_k]
        kept, mass = 0, 0.0
        while kept < len(values) and (row.top_p == 1.0 or mass < row.top_p * sum(values)):
            mass += values[kept]
            kept += 1
        probs_V = torch.where(probs_V >= values[kept - 1], probs_V, 0.0)
        rows.append(probs_V / probs_V.sum())
    return torch.stack(rows)


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


def _mix(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
