"""Definitions and the speed model, by worked examples and against plain simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drafters.eagle3_ssd.speed import (
    PairedTokens,
    RoundTimes,
    StepCosts,
    acceptance_by_position,
    break_even,
    critical_batch,
    exposed_share,
    hit_rate,
    joint_acceptance,
    retention,
    sd_over_ar,
    ssd_over_ar,
    ssd_over_sd,
    ssd_over_sd_limit,
    staleness,
    tokens_per_round,
    tokens_per_round_from_joint,
)

ACCEPTED = [0, 2, 3, 3]
TIMES = RoundTimes(autoregressive=0.018, verify=0.020, draft=0.010, background=0.016, fallback=0.008)


def test_tokens_per_round_counts_the_bonus_token() -> None:
    assert tokens_per_round(ACCEPTED) == 3.0
    assert tokens_per_round([0, 0]) == 1.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_tokens_per_round_is_one_plus_the_joint_acceptances(accepted: list[int]) -> None:
    assert tokens_per_round_from_joint(joint_acceptance(accepted, 5)) == pytest.approx(tokens_per_round(accepted))


def test_conditional_and_joint_acceptance_differ() -> None:
    assert joint_acceptance(ACCEPTED, 3) == [0.75, 0.75, 0.5]
    assert acceptance_by_position(ACCEPTED, [3, 3, 3, 3], 3) == pytest.approx([3 / 4, 1.0, 2 / 3])


def test_short_speculations_are_not_judged_where_they_had_no_token() -> None:
    assert acceptance_by_position([0, 1, 2], [0, 1, 3], 4) == [1.0, 1.0, 0.0, None]


def test_rates_of_nothing_are_none() -> None:
    assert hit_rate(3, 4) == 0.75
    assert hit_rate(0, 0) is None
    assert exposed_share([0.001, 0.0], [0.006, 0.004]) == pytest.approx(0.1)
    assert exposed_share([], []) is None


def test_ssd_over_ar_by_hand() -> None:
    times = RoundTimes(autoregressive=1, verify=1, background=0.9, fallback=0.5)
    assert ssd_over_ar(0.8, 4, 3, times) == pytest.approx(3.8 / 1.1)
    assert ssd_over_ar(0.8, 4, 3, times, batch=2) == pytest.approx(3.8 / (0.64 + 0.36 * 1.5))
    assert ssd_over_ar(0.8, 4, 3, RoundTimes(1, 1, background=1.2, fallback=0.5)) == pytest.approx(3.8 / 1.3)
    # In seconds: round = 0.02 + 0.2 * 0.008 = 0.0216; 3.8 tokens in it, against one in 0.018.
    assert ssd_over_ar(0.8, 4, 3, TIMES) == pytest.approx(3.8 * 0.018 / 0.0216)


def test_ssd_over_ar_equals_a_simulation() -> None:
    generator, seconds, tokens = random.Random(0), 0.0, 0.0
    for _ in range(100_000):
        hits = [generator.random() < 0.8 for _ in range(2)]
        seconds += max(TIMES.verify, TIMES.background) + (0 if all(hits) else TIMES.fallback)
        tokens += sum(4 if hit else 3 for hit in hits) / 2
    assert tokens / seconds * TIMES.autoregressive == pytest.approx(ssd_over_ar(0.8, 4, 3, TIMES, batch=2), rel=0.003)


def test_ssd_over_sd() -> None:
    assert sd_over_ar(3.6, TIMES) == pytest.approx(3.6 * 0.018 / 0.030)
    assert ssd_over_sd(0.8, 4, 3, 3.6, TIMES) == pytest.approx((3.8 / 0.0216) / (3.6 / 0.030))
    assert ssd_over_sd_limit(3.5, 3.6, TIMES) == pytest.approx(1.5 * 3.5 / 3.6)


@given(st.floats(0, 1), st.floats(1, 6), st.floats(1, 6), st.floats(1, 6), st.floats(0, 0.05), st.floats(0, 0.05))
def test_the_limit_is_a_limit(
    p: float, hit: float, miss: float, sd: float, background: float, fallback: float
) -> None:
    assume(miss <= hit)
    times = RoundTimes(0.018, 0.020, 0.010, background, fallback)
    assert ssd_over_sd(p, hit, miss, sd, times) <= ssd_over_sd_limit(hit, sd, times) * (1 + 1e-9)


def test_at_break_even_the_limit_is_one() -> None:
    assert break_even(TIMES) == pytest.approx(2 / 3)
    assert ssd_over_sd_limit(break_even(TIMES) * 3.6, 3.6, TIMES) == pytest.approx(1.0)


def speed(p: float, batch: int, background: float, answer: float, tokens: float) -> float:
    return tokens / (max(TIMES.verify, background) + (1 - p**batch) * answer)


@given(
    p=st.floats(0.3, 0.99),
    jit=st.floats(2, 5),
    loss=st.floats(0, 0.6),
    answer=st.floats(0.001, 0.03),
    background=st.floats(0, 0.03),
)
def test_the_critical_batch_is_the_first_where_the_cheap_answer_wins(
    p: float, jit: float, loss: float, answer: float, background: float
) -> None:
    cheap = jit * (1 - loss)
    times = RoundTimes(0.018, 0.020, background=background, fallback=answer)
    found = critical_batch(p, times, jit, cheap_fallback=0.0002, tokens_cheap=cheap)
    margins = {
        b: speed(p, b, background, 0.0002, cheap) / speed(p, b, background, answer, jit) - 1 for b in range(1, 400)
    }
    before = [margin for b, margin in margins.items() if found is None or b < found]
    after = [margin for b, margin in margins.items() if found is not None and b >= found]
    assert all(margin < 1e-9 for margin in before)
    assert all(margin > -1e-9 for margin in after)


def test_critical_batch_by_hand() -> None:
    """E 4 against 3.6, T 10 ms against 0, verification 20 ms: threshold 0.4 * 20 / (3.6 * 10) = 0.222; 1 - 0.9^b
    passes it at 3.
    """
    times = RoundTimes(0.018, 0.020, fallback=0.010)
    assert critical_batch(0.9, times, 4.0, 0.0, 3.6) == 3
    assert critical_batch(0.5, times, 4.0, 0.0, 3.6) == 1
    assert critical_batch(0.9, times, 4.0, 0.0, 2.0) is None
    assert critical_batch(1.0, times, 4.0, 0.0, 3.6) is None
    with pytest.raises(ValueError, match="cheap"):
        critical_batch(0.9, times, 3.0, 0.012, 3.5)


def test_staleness_compounds_over_hits_and_resets() -> None:
    jit = staleness((0,), 0, False, 3)
    assert jit == (0, 1, 2, 3)
    first = staleness(jit, 2, True, 3)
    assert first == (0, 4, 5, 6)
    second = staleness(first, 3, True, 3)
    assert second == (0, 8, 9, 10)
    assert staleness(second, 0, True, 3) == (0, 2, 3, 4)
    assert staleness(second, 3, False, 3) == (0, 1, 2, 3)
    assert staleness(second, 3, False, 0) == (0,)


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12), st.integers(0, 6))
def test_staleness_equals_counting_the_steps(lookahead: int, outcomes: list[tuple[int, bool]], refresh: int) -> None:
    """Counted on the path itself: a hit's in-flight feature j is the output of j more steps after the glue output at
    k'.
    """
    refresh = min(refresh, lookahead)
    lags = list(range(lookahead + 1))
    current = tuple(lags)
    for accepted, hit in outcomes:
        accepted = min(accepted, lookahead)
        depth = lags[accepted] if hit else -1
        chain = [
            depth := depth + 1 for _ in range(lookahead)
        ]  # steps behind the feature that each drafted slot is given
        lags = [0] + [steps + 1 for steps in chain]
        for _ in range(refresh):  # slot j+1 takes the output of slot j of the pass before
            lags = [0] + [lag + 1 for lag in lags[:-1]]
        current = staleness(current, accepted, hit, lookahead, refresh)
        assert list(current) == lags
    assert lookahead > refresh or max(current) <= lookahead


def test_step_costs_by_hand() -> None:
    costs = StepCosts(0.1, 0.05)
    assert (costs.of(1), costs.of(11)) == pytest.approx((0.1, 0.15))
    assert (costs.drafting(0), costs.drafting(1), costs.drafting(3)) == pytest.approx((0.0, 0.105, 0.305))
    times = costs.round_times(lookahead=2, fallback_lookahead=1, budget=21, refresh=1)
    assert (times.verify, times.draft, times.fallback) == pytest.approx((1.0, 0.205, 0.105))
    assert times.background == pytest.approx(0.115 + 0.105 + 2 * 0.2), (
        "extend and glue, one more pass, two tree steps of 21 rows"
    )


def test_retention_is_paired_and_counts_bonus_tokens() -> None:
    found = retention([PairedTokens(2, 1, 2), PairedTokens(1, 1, 2), PairedTokens(0, 0, 0)])
    assert (
        found is not None
        and found.value == pytest.approx((3 + 2) / (3 + 4))
        and found.low <= found.value <= found.high
    )
    assert retention([PairedTokens(3, 4, 4)] * 3) == (1.0, 1.0, 1.0), "no loss on any prompt: no width"
    assert retention([PairedTokens(0, 0, 0)]) is None and retention([]) is None


def test_the_retention_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """100 experiments of 24 prompts with a true retention of 0.9: fewer than 85 covered has a probability below 1e-3
    at 93 %.
    """
    generator = np.random.default_rng(3)
    covered = 0
    for number in range(100):
        rounds = generator.integers(20, 60, 24)
        fresh = generator.binomial(4 * rounds, 0.5)
        served = [
            round(0.9 * (1 + f / n + generator.normal(0, 0.3)) * n - n) for f, n in zip(fresh, rounds, strict=True)
        ]
        pairs = [PairedTokens(int(n), s, int(f)) for n, s, f in zip(rounds, served, fresh, strict=True)]
        interval = retention(pairs, resamples=400, seed=number)
        assert interval is not None
        covered += interval.low <= 0.9 <= interval.high
    assert covered >= 85
