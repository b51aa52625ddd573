"""Figures of speculative decoding and the speed that they predict: tokens per round, acceptance, retention, staleness.

The formulas are explained in infer/README.md, section 3, staleness in infer/draft/README.md, section 3. Torch-free.

Times are in seconds. "Accepted" counts drafted tokens; tokens per round count the bonus token too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from drafters.base.bootstrap import Interval, bootstrap_interval


@dataclass(frozen=True)
class RoundTimes:
    """Measured times of one machine, in seconds or, for predictions, in verifications."""

    autoregressive: float  # one plain one-token step of the target
    verify: float  # one verification of K + 1 tokens
    draft: float = 0.0  # the whole draft of a round in synchronous SD
    background: float = 0.0  # extend + glue + K tree steps, while the target verifies
    fallback: float = 0.0  # the answer to a miss


@dataclass(frozen=True)
class StepCosts:
    """What drafting costs, in verifications: a drafter step of one row, and of each further row as a share of that
    step.

    Decoding reads all weights for each step, so `step` is about the drafter's weights over the target's; a further row
    costs little until arithmetic takes longer than reading. `StepCosts(0.1, 0.05).of(11)` = 0.1 * 1.5 = 0.15.
    """

    step: float
    row: float

    def of(self, rows: int) -> float:
        """A step of so many rows."""
        return self.step * (1 + self.row * (rows - 1))

    def drafting(self, tokens: int) -> float:
        """Drafting `tokens` tokens one after another: the first step takes the newly accepted slot along."""
        return self.of(2) + (tokens - 1) * self.of(1) if tokens else 0.0

    def round_times(self, lookahead: int, fallback_lookahead: int, budget: int, refresh: int = 0) -> RoundTimes:
        """Times of SSD rounds, and of SD rounds with the same look-ahead, in verifications."""
        glue = self.of(lookahead + 2) + refresh * self.of(lookahead)
        background = glue + lookahead * self.of(budget)
        return RoundTimes(1.0, 1.0, self.drafting(lookahead), background, self.drafting(fallback_lookahead))


class PairedTokens(NamedTuple):
    """Of one prompt: number of hit rounds, and tokens accepted in them, of what was served and of a fresh draft."""

    rounds: int
    served: int
    fresh: int


def retention(prompts: Sequence[PairedTokens], resamples: int = 2000, seed: int = 0) -> Interval | None:
    """Tokens per round of the cached speculations that were served, over those of fresh ones at the same contexts
    (infer/README.md, section 3).

    The interval draws prompts again with replacement. None where no round was a hit. `[(2, 1, 2), (1, 1, 2)]` gives
    (3 + 2) / (3 + 4) = 0.714: three rounds, two tokens accepted of four.
    """
    rounds_N, served_N, fresh_N = np.array(prompts, dtype=np.int64).reshape(-1, 3).T

    def quotient(drawn_SN: np.ndarray) -> np.ndarray:
        return (rounds_N + served_N)[drawn_SN].sum(1) / (rounds_N + fresh_N)[drawn_SN].sum(1)

    return bootstrap_interval(quotient, len(prompts), resamples, seed)


def tokens_per_round(accepted: Sequence[int]) -> float:
    """tau: committed tokens per target forward, bonus included. `accepted` holds the accepted drafted tokens of each
    round.

    `tokens_per_round([0, 2, 3, 3])` = (1 + 3 + 4 + 4) / 4 = 3.0.
    """
    return 1 + sum(accepted) / len(accepted)


def tokens_per_round_from_joint(joint: Sequence[float]) -> float:
    """tau from joint acceptances: joint[j-1] = P(s_1..s_j all accepted). `[0.75, 0.75, 0.5]` gives 3.0."""
    return 1 + sum(joint)


def joint_acceptance(accepted: Sequence[int], lookahead: int) -> list[float]:
    """P(s_1..s_j all accepted) for j = 1..K over all rounds; a speculation shorter than j counts as not accepted
    there.
    """
    return [sum(count >= j for count in accepted) / len(accepted) for j in range(1, lookahead + 1)]


def acceptance_by_position(accepted: Sequence[int], offered: Sequence[int], lookahead: int) -> list[float | None]:
    """P(s_j accepted | s_1..s_{j-1} accepted), j = 1..K, over the rounds whose speculation had a j-th token; None: no
    such round.

    `acceptance_by_position([0, 2, 3, 3], [3, 3, 3, 3], 3)` = [3/4, 3/3, 2/3].
    """
    rates: list[float | None] = []
    for j in range(1, lookahead + 1):
        judged = [count for count, length in zip(accepted, offered, strict=True) if length >= j and count >= j - 1]
        rates.append(sum(count >= j for count in judged) / len(judged) if judged else None)
    return rates


def hit_rate(hits: int, looked_up: int) -> float | None:
    """Hits over outcomes looked up; a request's first round looks nothing up and is not counted. None where nothing
    was.
    """
    return hits / looked_up if looked_up else None


def exposed_share(waits: Sequence[float], draft_busy: Sequence[float]) -> float | None:
    """Share of the drafting time that the target waited for: over the hit rounds, its waits over the draft process's
    busy time. 0 is drafting that costs nothing. None where nothing was drafted.
    """
    busy = sum(draft_busy)
    return sum(waits) / busy if busy > 0 else None


def ssd_over_ar(p: float, tokens_hit: float, tokens_miss: float, times: RoundTimes, batch: int = 1) -> float:
    """Predicted speed of SSD over autoregressive decoding.

    `p` hit rate of one request, `tokens_hit` and `tokens_miss` tokens per round after a hit and after a miss. The
    round stalls for the fallback unless all `batch` requests hit. With t_AR = t_verify, p = 0.8, E = 4 and 3,
    background 0.9, fallback 0.5 (in verifications): 3.8 / (0.8 * 1 + 0.2 * 1.5) = 3.45.
    """
    return _tokens(p, tokens_hit, tokens_miss) * times.autoregressive / (times.verify * _ssd_round(p, times, batch))


def sd_over_ar(tokens_sd: float, times: RoundTimes) -> float:
    """Predicted speed of synchronous speculative decoding over autoregressive decoding."""
    return tokens_sd * times.autoregressive / (times.verify + times.draft)


def ssd_over_sd(
    p: float, tokens_hit: float, tokens_miss: float, tokens_sd: float, times: RoundTimes, batch: int = 1
) -> float:
    """Predicted speed of SSD over synchronous SD, misses and exposed drafting included."""
    return ssd_over_ar(p, tokens_hit, tokens_miss, times, batch) / sd_over_ar(tokens_sd, times)


def ssd_over_sd_limit(tokens_hit: float, tokens_sd: float, times: RoundTimes) -> float:
    """The most SSD can gain over synchronous SD, all hits and no exposed drafting: (1 + T_SD) E_hit / E_SD."""
    return (1 + times.draft / times.verify) * tokens_hit / tokens_sd


def break_even(times: RoundTimes) -> float:
    """The E_hit / E_SD above which SSD can beat synchronous SD at all: t_verify / (t_verify + t_draft)."""
    return times.verify / (times.verify + times.draft)


def critical_batch(
    p: float, times: RoundTimes, tokens_jit: float, cheap_fallback: float, tokens_cheap: float
) -> int | None:
    """b*: the smallest batch at which a cheap answer to misses is faster than JIT drafting; None: JIT is at no batch
    slower.

    `tokens_jit` and `tokens_cheap` are tokens per round and request over hits and misses together, `times.fallback`
    the JIT answer's seconds and `cheap_fallback` the cheap one's. A round stalls with probability s = 1 - p^b. The
    cheap answer is faster iff E_cheap / (m + s T_cheap) > E_jit / (m + s T_jit), m = max(t_verify, background): linear
    in s, so one threshold.
    """
    round_time = max(times.verify, times.background)
    gain = tokens_cheap * times.fallback - tokens_jit * cheap_fallback
    loss = (tokens_jit - tokens_cheap) * round_time
    if loss < 0 and gain < 0:
        raise ValueError(
            f"a cheap answer that is better and slower than JIT ({tokens_cheap} > {tokens_jit}) is not a cheap answer"
        )
    if gain <= 0:
        return None if loss >= 0 else 1
    stalls = loss / gain  # faster iff s > stalls
    if stalls < 1 - p:
        return 1
    if stalls >= 1 or p == 1:
        return None
    return math.floor(math.log(1 - stalls) / math.log(p)) + 1


def staleness(previous: Sequence[int], accepted: int, hit: bool, lookahead: int, refresh: int = 0) -> tuple[int, ...]:
    """D_r(0..K): drafter steps since a true target feature, on the input path of each glue slot.

    `previous` is D_{r-1} and `accepted` the k' of the outcome between the rounds; `lookahead` the length now in
    flight. D(0) = 0; D(j) = j after a JIT or n-gram answer; D(j) = D_{r-1}(k') + 1 + j after a hit. `refresh` passes
    make the first ones exact again. K = 3: (0, 1, 2, 3), a hit with 2 accepted -> (0, 4, 5, 6), a hit with 3 accepted
    -> (0, 8, 9, 10), a miss -> (0, 1, 2, 3).
    """
    shift = previous[accepted] + 1 if hit else 0
    return tuple(j if j <= refresh else j + shift for j in range(lookahead + 1))


def _tokens(p: float, tokens_hit: float, tokens_miss: float) -> float:
    return p * tokens_hit + (1 - p) * tokens_miss


def _ssd_round(p: float, times: RoundTimes, batch: int) -> float:
    """Expected length of an SSD round in units of one verification."""
    background, fallback = times.background / times.verify, times.fallback / times.verify
    return max(1.0, background) + (1 - p**batch) * fallback
