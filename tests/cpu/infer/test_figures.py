"""Figures against hand-made records: definitions of infer/README.md, section 3, intervals over prompts, and the
predicted speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from infer.engine.request import RoundRecord
from infer.evaluation import figures
from infer.ipc.messages import Source


@dataclass
class Finished:
    """What the figures read of a finished request."""

    new_tokens: list[int]
    decode_seconds: float
    rounds: list[RoundRecord] = field(default_factory=list)
    prefill_seconds: float = 0.5


def record(
    source: Source, accepted: int, offered: int = 3, verify: float = 0.02, wait: float = 0.0, draft: float = 0.01
) -> RoundRecord:
    return RoundRecord(source, offered, accepted, accepted + 1, verify, wait, draft)


ROUNDS = [
    record(Source.FIRST, 3, wait=0.009),
    record(Source.HIT, 2, wait=0.001, draft=0.01),
    record(Source.HIT, 0, wait=0.001, draft=0.03),
    record(Source.JIT, 1, wait=0.012, draft=0.02),
    record(Source.NONE, 0, offered=0),
]


def test_speed_leaves_out_prompt_and_first_token() -> None:
    answers = [Finished([1] * 11, 2.0), Finished([1] * 31, 3.0)]
    assert figures.tokens_per_second(answers) == (10 + 30) / 5.0
    assert figures.tokens_per_second([Finished([1], 0.0)]) is None
    assert figures.tokens_per_second([]) is None


def test_rates_by_source() -> None:
    assert figures.tokens_per_round(ROUNDS) == (4 + 3 + 1 + 2 + 1) / 5
    assert figures.tokens_per_round(ROUNDS, [Source.HIT]) == 2.0
    assert figures.tokens_per_round(ROUNDS, figures.MISSES) == 1.5
    assert figures.hit_rate(ROUNDS) == 0.5  # the first round looks nothing up
    assert figures.hit_rate([record(Source.FIRST, 0)]) is None
    assert figures.tokens_per_round([]) is None


def test_acceptance_is_conditional_and_over_rounds_that_offered_the_position() -> None:
    assert figures.acceptance_by_position(ROUNDS, 4) == [3 / 4, 2 / 3, 1 / 2, None]


def test_exposed_share_counts_hit_rounds_only() -> None:
    assert figures.exposed_share(ROUNDS) == pytest.approx(0.002 / 0.04)
    assert figures.exposed_share([record(Source.JIT, 1)]) is None


def test_standing_still_is_the_wait_or_in_sd_the_drafting() -> None:
    assert figures.drafting_seconds(record(Source.SYNC, 1, wait=0.0, draft=0.004)) == 0.004
    assert figures.drafting_seconds(record(Source.HIT, 1, wait=0.001, draft=0.004)) == 0.001


def test_spread_is_in_milliseconds() -> None:
    spread = figures.percentiles_ms([0.001 * n for n in range(1, 12)])
    assert spread is not None
    assert spread.p50 == pytest.approx(6.0)
    assert spread.p90 == pytest.approx(10.0)
    assert figures.percentiles_ms([]) is None


def test_a_ratio_that_is_the_same_on_each_prompt_has_no_width() -> None:
    slow = [Finished([1] * n, n / 10) for n in (11, 21, 51)]
    fast = [Finished(a.new_tokens, a.decode_seconds / 2) for a in slow]
    assert figures.ratio_interval(fast, slow) == pytest.approx((2.0, 2.0, 2.0))
    speed = figures.speed_interval(slow)
    assert speed is not None
    assert speed.low < speed.value < speed.high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """100 experiments of 24 prompts with a true ratio of 1.5: fewer than 85 covered has a probability below 1e-3 at 93
    %.
    """
    generator = np.random.default_rng(7)
    covered = 0
    for number in range(100):
        seconds = generator.uniform(0.8, 1.2, (2, 24))
        slow = [Finished([1] * 101, 1.5 * s) for s in seconds[0]]
        fast = [Finished([1] * 101, s) for s in seconds[1]]
        interval = figures.ratio_interval(fast, slow, resamples=400, seed=number)
        assert interval is not None
        covered += interval.low <= 1.5 <= interval.high
    assert covered >= 85


def test_pairs_have_to_be_pairs() -> None:
    with pytest.raises(AssertionError, match="2 and 1"):
        figures.ratio_interval([Finished([1, 2], 1.0)] * 2, [Finished([1, 2], 1.0)])
    assert figures.ratio_interval([], []) is None
    # answers of one token have no speed
    assert figures.ratio_interval([Finished([1], 0.0)], [Finished([1], 0.0)]) is None


@pytest.mark.parametrize(
    ("first", "second", "parting"),
    [
        ([1, 2, 3], [1, 5], (1, 2, 5)),
        ([1, 2], [1, 2], None),
        ([1, 2], [1], (1, 2, None)),
        ([], [4], (0, None, 4)),
        ([], [], None),
    ],
)
def test_first_divergence(
    first: list[int], second: list[int], parting: tuple[int, int | None, int | None] | None
) -> None:
    assert figures.first_divergence(first, second) == parting


def test_the_prediction_is_exact_where_rounds_are_as_the_formula_assumes() -> None:
    """AR 16 ms; SD 17 + 6 ms, 3 tokens; SSD 18 ms, a hit gives 4 tokens, a miss 2 and waits 5 ms for its answer; all
    hidden.
    """
    ar = [Finished([1] * 101, 1.6, [RoundRecord(Source.NONE, 0, 0, 1, 0.016, 0.0, 0.0)] * 100)]
    sd = [Finished([1] * 301, 2.3, [RoundRecord(Source.SYNC, 3, 2, 3, 0.017, 0.0, 0.006)] * 100)]
    hits = [RoundRecord(Source.HIT, 3, 3, 4, 0.018, 0.0, 0.012)] * 75
    misses = [RoundRecord(Source.JIT, 3, 1, 2, 0.018, 0.005, 0.017)] * 25
    ssd = [Finished([1] * 351, 100 * 0.018 + 25 * 0.005, hits + misses)]
    times = figures.measured_times(ar, sd, ssd)
    assert times is not None
    assert (times.sd.autoregressive, times.sd.verify, times.sd.draft) == pytest.approx((0.016, 0.017, 0.006))
    assert (times.ssd.autoregressive, times.ssd.verify) == pytest.approx((0.016, 0.018))
    assert (times.ssd.background, times.ssd.fallback) == pytest.approx((0.012, 0.005))
    predicted = figures.predicted_ratios(figures.rounds_of(sd), figures.rounds_of(ssd), times)
    for name, (fast, slow) in {"ssd/ar": (ssd, ar), "ssd/sd": (ssd, sd), "sd/ar": (sd, ar)}.items():
        interval = figures.ratio_interval(fast, slow)
        assert interval is not None
        assert predicted[name] == pytest.approx(interval.value)
    assert figures.measured_times(ar, sd, []) is None
