"""Speed, acceptance and hit rate of finished requests, as `results.json` holds them (infer/README.md, section 3).

Pure functions. Times are in seconds, in milliseconds where a name ends in `_ms`. Rates are over all rounds of all
prompts together; they are not means of the prompts' own rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from drafters.base.bootstrap import Interval, bootstrap_interval
from drafters.eagle3_ssd import speed
from infer.engine.request import RoundRecord
from infer.ipc.messages import Source

LOOKED_UP = frozenset({Source.HIT, Source.JIT, Source.NGRAM, Source.NONE})
MISSES = LOOKED_UP - {Source.HIT}


class FinishedRequest(Protocol):
    """The fields of a finished request that the figures are computed from; `infer.engine.request.Request` has them."""

    @property
    def new_tokens(self) -> Sequence[int]: ...
    @property
    def rounds(self) -> Sequence[RoundRecord]: ...
    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...


class Percentiles(NamedTuple):
    """Median and 90th percentile, in milliseconds."""

    p50: float
    p90: float


class MeasuredTimes(NamedTuple):
    """Times of the two speculating modes; their verifications differ, since each mode has its own look-ahead."""

    sd: speed.RoundTimes
    ssd: speed.RoundTimes


class Divergence(NamedTuple):
    """Two token sequences are equal before `index` and hold `first` and `second` there (None: that one has ended)."""

    index: int
    first: int | None
    second: int | None


def tokens_per_second(answers: Sequence[FinishedRequest]) -> float | None:
    """Decoding speed: the tokens after each answer's first, over the seconds in which they were made; None where there
    are none.

    The first token comes out of the prompt's forward, which `prefill_seconds` counts and this figure leaves out.
    """
    seconds = sum(answer.decode_seconds for answer in answers)
    return sum(len(answer.new_tokens) - 1 for answer in answers) / seconds if seconds > 0 else None


def rounds_of(answers: Iterable[FinishedRequest]) -> list[RoundRecord]:
    """All rounds of all answers."""
    return list(chain.from_iterable(answer.rounds for answer in answers))


def tokens_per_round(rounds: Sequence[RoundRecord], sources: Iterable[Source] | None = None) -> float | None:
    """tau: committed tokens per target forward, bonus token included, before a stop trims them.

    Of the rounds whose speculation came from `sources` only, where they are given.
    """
    chosen = [record.emitted for record in _from(rounds, sources)]
    return sum(chosen) / len(chosen) if chosen else None


def hit_rate(rounds: Sequence[RoundRecord]) -> float | None:
    """Hits over outcomes looked up, of rounds in mode ssd (the others have no cache); None where nothing was looked
    up.
    """
    return speed.hit_rate(len(_from(rounds, [Source.HIT])), len(_from(rounds, LOOKED_UP)))


def acceptance_by_position(rounds: Sequence[RoundRecord], lookahead: int) -> list[float | None]:
    """P(token j accepted | those before it were), j = 1..K, over the rounds that offered a j-th token."""
    return speed.acceptance_by_position([r.accepted for r in rounds], [r.offered for r in rounds], lookahead)


def exposed_share(rounds: Sequence[RoundRecord]) -> float | None:
    """Share of the drafting time that is exposed: over the hit rounds, the target's waits over the draft process's
    busy time. 0 is drafting that costs nothing; None where no round was a hit.
    """
    hits = _from(rounds, [Source.HIT])
    return speed.exposed_share([record.wait for record in hits], [record.draft for record in hits])


def percentiles_ms(seconds: Sequence[float]) -> Percentiles | None:
    """p50 and p90 of times given in seconds; None where there are none."""
    if not seconds:
        return None
    p50, p90 = np.percentile(np.asarray(seconds) * 1000, [50, 90])
    return Percentiles(float(p50), float(p90))


def speed_interval(answers: Sequence[FinishedRequest], resamples: int = 2000, seed: int = 0) -> Interval | None:
    """Tokens per second with its interval over prompts."""
    return bootstrap_interval(lambda drawn_SN: _speeds(answers, drawn_SN), len(answers), resamples, seed)


def ratio_interval(
    fast: Sequence[FinishedRequest], slow: Sequence[FinishedRequest], resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """Speed of `fast` over that of `slow` on the same prompts in the same order; prompts are drawn in pairs."""
    assert len(fast) == len(slow), f"{len(fast)} and {len(slow)} answers are not pairs"
    return bootstrap_interval(
        lambda drawn_SN: _speeds(fast, drawn_SN) / _speeds(slow, drawn_SN), len(fast), resamples, seed
    )


def first_divergence(first: Sequence[int], second: Sequence[int]) -> Divergence | None:
    """The first place where two answers differ; None where they are equal.

    `first_divergence([1, 2, 3], [1, 5])` is (1, 2, 5).
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    if shared == len(first) == len(second):
        return None
    return Divergence(
        shared, first[shared] if shared < len(first) else None, second[shared] if shared < len(second) else None
    )


def drafting_seconds(record: RoundRecord) -> float:
    """How long the target waited for the round's speculation; in mode sd that is the drafting itself."""
    return record.draft if record.source is Source.SYNC else record.wait


def round_seconds(answers: Sequence[FinishedRequest]) -> float | None:
    """Mean length of a decoding round, everything included."""
    count = len(rounds_of(answers))
    return sum(answer.decode_seconds for answer in answers) / count if count else None


def measured_times(
    ar: Sequence[FinishedRequest], sd: Sequence[FinishedRequest], ssd: Sequence[FinishedRequest]
) -> MeasuredTimes | None:
    """The times of the speed formula (infer/README.md, section 3) from three measured modes; None where one has no
    rounds.

    A round without its drafting is a verification, the engine's own work included. The draft process is busy with
    extend, glue and tree in a hit round, and with the answer before that in a miss: the difference of the two is the
    fallback's time.
    """
    if not (rounds_of(ar) and rounds_of(sd) and rounds_of(ssd)):
        return None
    alone = round_seconds(ar) or 0.0
    hits, misses = _from(rounds_of(ssd), [Source.HIT]), _from(rounds_of(ssd), MISSES)
    background = _mean([record.draft for record in hits or rounds_of(ssd)])
    return MeasuredTimes(
        sd=speed.RoundTimes(alone, _verification(sd), draft=_mean(list(map(drafting_seconds, rounds_of(sd))))),
        ssd=speed.RoundTimes(
            alone,
            _verification(ssd),
            background=background,
            fallback=max(0.0, _mean([record.draft for record in misses]) - background) if misses else 0.0,
        ),
    )


def predicted_ratios(
    rounds_sd: Sequence[RoundRecord], rounds_ssd: Sequence[RoundRecord], times: MeasuredTimes
) -> dict[str, float]:
    """The speed ratios that the formula (infer/README.md, section 3) gives for measured times and tokens per round."""
    everywhere = tokens_per_round(rounds_ssd) or 1.0
    tokens_hit = tokens_per_round(rounds_ssd, [Source.HIT]) or everywhere
    tokens_miss = tokens_per_round(rounds_ssd, MISSES) or everywhere
    ssd_over_ar = speed.ssd_over_ar(hit_rate(rounds_ssd) or 0.0, tokens_hit, tokens_miss, times.ssd)
    sd_over_ar = speed.sd_over_ar(tokens_per_round(rounds_sd) or 1.0, times.sd)
    return {"ssd/ar": ssd_over_ar, "ssd/sd": ssd_over_ar / sd_over_ar, "sd/ar": sd_over_ar}


def _verification(answers: Sequence[FinishedRequest]) -> float:
    return (round_seconds(answers) or 0.0) - _mean(list(map(drafting_seconds, rounds_of(answers))))


def _from(rounds: Sequence[RoundRecord], sources: Iterable[Source] | None) -> list[RoundRecord]:
    wanted = None if sources is None else set(sources)
    return [record for record in rounds if wanted is None or record.source in wanted]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _speeds(answers: Sequence[FinishedRequest], drawn_SN: np.ndarray) -> np.ndarray:
    """Tokens per second of S samples of N answers each."""
    tokens = np.array([len(answer.new_tokens) - 1 for answer in answers])
    seconds = np.array([answer.decode_seconds for answer in answers])
    return tokens[drawn_SN].sum(1) / seconds[drawn_SN].sum(1)
