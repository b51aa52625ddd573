"""Outcome policies: how the budget of branches is spread, which bonus tokens are prepared, how branches are numbered
(infer/draft/README.md, section 1).

An outcome is (k, t): the first k of K speculated tokens were accepted and t is the bonus token after them. Branches
are numbered by k first, then by rank: branch `offsets[k] + i` is the (i+1)-th choice of a bonus token after k accepted
tokens. F_k, the fan-out, is how many there are at k. Tokens are target ids throughout.

G rows of glue logits (K + 1 per request), D draft vocabulary, F tokens per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from drafters.base.errors import UserError
from drafters.eagle3_ssd.card import DrafterCard
from infer.kernels.sampling.saguaro import top_f


class Policy(StrEnum):
    """How a budget of branches is spread over k = 0..K."""

    UNIFORM = "uniform"
    GEOMETRIC = "geometric"


class PowerLaw(NamedTuple):
    """miss_k(F) = min(1, A F^-r), miss(0) = 1: the chance that the bonus token is not among the first F choices."""

    inner: float  # A for k < K, where a token was rejected
    last: float  # A for k = K, where all were accepted
    exponent: float  # r


@dataclass(frozen=True)
class OutcomeStatistics:
    """What was measured about a drafter on held-out data; the drafter's card stores it.

    `reach[k]` is the share of rounds in which exactly k tokens were accepted (k = 0..K, sum 1); `recall[k][F-1]` the
    share of those whose bonus token was among the first F choices. Without the two tables the closed form is used,
    from `acceptance` and `law` alone.
    """

    acceptance: float | None = None
    law: PowerLaw | None = None
    reach: tuple[float, ...] = ()
    recall: tuple[tuple[float, ...], ...] = ()


def statistics_of(card: DrafterCard, after_hit: bool) -> OutcomeStatistics:
    """The card's figures. Features are older after a hit, so the tables differ; where one is missing the other stands
    in.
    """
    tables = (card.measured_lagged, card.measured_fresh) if after_hit else (card.measured_fresh, card.measured_lagged)
    measured = tables[0] or tables[1]
    return OutcomeStatistics(
        acceptance=card.law.a if card.law else None,
        law=PowerLaw(card.law.miss_rejected, card.law.miss_accepted, card.law.r) if card.law else None,
        reach=measured.reach if measured else (),
        recall=measured.recall if measured else (),
    )


class Branches(NamedTuple):
    """The chosen outcomes of one round, one entry per branch."""

    ks: tuple[int, ...]
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]  # K + 2 entries: the branches at k are offsets[k] .. offsets[k + 1] - 1


def find(branches: Branches, k: int, token: int) -> int | None:
    """The number of the branch prepared for the outcome (k, token), or None: a miss."""
    if k + 1 >= len(branches.offsets):
        return None
    start, end = branches.offsets[k], branches.offsets[k + 1]
    tokens = branches.tokens[start:end]
    return start + tokens.index(token) if token in tokens else None


def select(
    glue_logits_GD: Tensor,
    speculation: Sequence[int],
    fan_out: Sequence[int],
    draft_to_target_D: Tensor | None = None,
    lowered: Sequence[Sequence[int]] | None = None,
) -> Branches:
    """Choose the bonus tokens to prepare for, from the K + 1 glue distributions of one request.

    `speculation` are the K tokens in flight, `fan_out` the F_k. At k < K the token speculated next is no candidate:
    given that it was rejected, the bonus token cannot be it. `lowered[k]`: the tokens whose weight Saguaro sampling
    lowered when speculation[k] was drawn, likeliest first; the residual lives on them, so they come before the rest.
    Where the draft vocabulary has too few tokens, fewer branches are returned. `draft_to_target_D` None: the two
    vocabularies are one.
    """
    return select_many(glue_logits_GD, [speculation], [fan_out], draft_to_target_D, [lowered])[0]


def select_many(
    glue_logits_GD: Tensor,
    speculations: Sequence[Sequence[int]],
    fan_outs: Sequence[Sequence[int]],
    draft_to_target_D: Tensor | None = None,
    lowered: Sequence[Sequence[Sequence[int]] | None] | None = None,
) -> list[Branches]:
    """`select` for several requests, whose glue rows stand one request after another: one top-F over all of them."""
    assert sum(len(s) + 1 for s in speculations) == len(glue_logits_GD), (speculations, glue_logits_GD.shape)
    assert all(len(f) == len(s) + 1 for f, s in zip(fan_outs, speculations, strict=True)), (fan_outs, speculations)
    ranked_GF = top_f(
        glue_logits_GD, 1 + max(max(f) for f in fan_outs)
    )  # one more, for the token that may be excluded
    if draft_to_target_D is not None:
        ranked_GF = draft_to_target_D[ranked_GF]
    ranked = ranked_GF.tolist()
    result, start = [], 0
    for speculation, fan_out, first in zip(speculations, fan_outs, lowered or [None] * len(speculations), strict=True):
        result.append(_branches(ranked[start : start + len(fan_out)], speculation, fan_out, first or ()))
        start += len(fan_out)
    return result


def _branches(
    ranked: Sequence[Sequence[int]],
    speculation: Sequence[int],
    fan_out: Sequence[int],
    lowered: Sequence[Sequence[int]],
) -> Branches:
    ks: list[int] = []
    tokens: list[int] = []
    offsets = [0]
    for k, count in enumerate(fan_out):
        excluded = speculation[k] if k < len(speculation) else None
        first = lowered[k] if k < len(lowered) else ()
        candidates = dict.fromkeys([*first, *ranked[k]])  # ordered, each once
        chosen = [token for token in candidates if token != excluded][:count]
        tokens += chosen
        ks += [k] * len(chosen)
        offsets.append(len(tokens))
    return Branches(tuple(ks), tuple(tokens), tuple(offsets))


@lru_cache(maxsize=256)
def fan_out(
    policy: Policy | str, lookahead: int, budget: int, statistics: OutcomeStatistics | None = None
) -> tuple[int, ...]:
    """F_0..F_K for a speculation of length K = `lookahead`, summing to `budget`. Cached: served lengths vary from 0 to
    K.

    `geometric` hands out the budget by the drafter's measured tables where there are any, else by the closed form.
    Raises `UserError` where the drafter's card says nothing about acceptance.
    """
    if Policy(policy) is Policy.UNIFORM:
        return uniform(lookahead, budget)
    if statistics is not None and statistics.reach:
        return measured(budget, *resize(statistics, lookahead), statistics.law.exponent if statistics.law else 1.0)
    if statistics is not None and statistics.law is not None and statistics.acceptance is not None:
        return geometric(lookahead, budget, statistics.acceptance, statistics.law)
    raise UserError(
        "policy = geometric needs the drafter's measured acceptance and its card has none: use policy=uniform"
    )


def uniform(lookahead: int, budget: int) -> tuple[int, ...]:
    """The same F at each k; what does not divide goes to the smallest k. `uniform(2, 7)` is (3, 2, 2)."""
    each, rest = divmod(budget, lookahead + 1)
    return tuple(each + (k < rest) for k in range(lookahead + 1))


def geometric(lookahead: int, budget: int, acceptance: float, law: PowerLaw) -> tuple[int, ...]:
    """Theorem 12 of arXiv 2603.03251, with the scales A of the fitted law: F_k proportional to (reach_k
    A_k)^(1/(1+r)).

    reach_k = a^k (1 - a) for k < K and a^K for k = K. With equal A this is F_k = F_0 a^(k/(1+r)) and
    F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)). Integers by largest remainder.
    """
    reach = geometric_reach(lookahead, acceptance)
    scales = [law.inner] * lookahead + [law.last]
    return largest_remainder(
        [(p * scale) ** (1 / (1 + law.exponent)) for p, scale in zip(reach, scales, strict=True)], budget
    )


def geometric_reach(lookahead: int, acceptance: float) -> list[float]:
    """P(exactly k accepted), k = 0..K, where each token is accepted with the same probability."""
    return [acceptance**k * (1 - acceptance) for k in range(lookahead)] + [acceptance**lookahead]


def measured(
    budget: int, reach: Sequence[float], recall: Sequence[Sequence[float]], tail_exponent: float = 1.0
) -> tuple[int, ...]:
    """Give out the budget where a branch adds most hits, by measured reach_k and recall_k@F.

    Each time the k with the largest gain per branch takes the branches that give it: one, or several where a later
    choice adds more than the next (a first choice that seldom hits must not hide a second one that often does). Best
    possible where the gains of each k fall, and otherwise up to the last hand-out. Beyond the measured F the miss
    probability goes on as F^-tail_exponent.
    """
    counts = [0] * len(reach)

    def best_step(k: int, left: int) -> tuple[float, int]:
        """Gain per branch and how many; the smallest number of equal ones. Beyond its table a row's gains fall: one
        will do.
        """
        now = recall_at(recall[k], counts[k], tail_exponent)
        sizes = range(1, min(left, max(1, len(recall[k]) - counts[k])) + 1)
        gains = [
            (reach[k] * (recall_at(recall[k], counts[k] + size, tail_exponent) - now) / size, -size) for size in sizes
        ]
        gain, size = max(gains)
        return gain, -size

    while left := budget - sum(counts):
        steps = [best_step(k, left) for k in range(len(reach))]
        k = max(range(len(steps)), key=lambda k: steps[k][0])  # the smallest k of equal ones
        counts[k] += steps[k][1]
    return tuple(counts)


def recall_at(recall: Sequence[float], count: int, tail_exponent: float = 1.0) -> float:
    """recall@count from a table for 1..len(recall); 0 at 0; beyond the table the miss falls as F^-tail_exponent."""
    if count == 0:
        return 0.0
    if count <= len(recall):
        return recall[count - 1]
    return 1 - (1 - recall[-1]) * (count / len(recall)) ** -tail_exponent


def expected_hit_rate(
    counts: Sequence[int], reach: Sequence[float], recall: Sequence[Sequence[float]], tail_exponent: float = 1.0
) -> float:
    """P(the outcome is among the branches) = sum_k reach_k recall_k@F_k."""
    return sum(p * recall_at(row, count, tail_exponent) for p, row, count in zip(reach, recall, counts, strict=True))


def resize(statistics: OutcomeStatistics, lookahead: int) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """The measured tables, for a speculation of another length than they were measured with.

    Shorter (L < K): all rounds that got to L end there, with nothing rejected, so they take the recall of the last
    row. Longer: the share that goes on at each further token stays as at the last one measured, a rejection there as
    at k = K - 1.
    """
    reach, recall = statistics.reach, statistics.recall
    longest = len(reach) - 1
    if lookahead <= longest:
        return (*reach[:lookahead], sum(reach[lookahead:])), (*recall[:lookahead], recall[-1])
    before = sum(reach[longest - 1 :]) if longest else 1.0
    accept = (reach[-1] / before if before > 0 else 0.0) if longest else statistics.acceptance or 0.0
    extra = lookahead - longest
    tail = [reach[-1] * p for p in geometric_reach(extra, accept)]
    rejected = recall[-2] if longest else recall[-1]
    return (*reach[:-1], *tail), (*recall[:-1], *[rejected] * extra, recall[-1])


def largest_remainder(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Integers >= 0 that sum to `total`, each within 1 of its proportional share; equal remainders go to the smallest
    index.
    """
    scale = total / sum(weights)
    shares = [weight * scale for weight in weights]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def fit_power_law(miss_KF: Sequence[Sequence[float]]) -> PowerLaw | None:
    """Fit A (k < K), A (k = K) and one exponent r to `miss_KF[k][F-1]`, by least squares of log miss on log F.

    Points at 0 (never missed: no logarithm) and at 1 (the law's cap) say nothing about the line and are left out. None
    where a group has no point left, or neither group has two different F: the table does not determine the law.
    """
    groups = []
    for rows in (miss_KF[:-1], miss_KF[-1:]):
        points = [(math.log(i + 1), math.log(miss)) for row in rows for i, miss in enumerate(row) if 0 < miss < 1]
        if not points:
            return None
        mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
        groups.append((points, mean_x, mean_y))
    square = sum((x - mean_x) ** 2 for points, mean_x, _ in groups for x, _ in points)
    if square == 0:
        return None
    slope = min(0.0, sum((x - mean_x) * (y - mean_y) for points, mean_x, mean_y in groups for x, y in points) / square)
    inner, last = (math.exp(mean_y - slope * mean_x) for _, mean_x, mean_y in groups)
    return PowerLaw(inner, last, -slope)
