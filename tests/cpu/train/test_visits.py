"""Depth visits against a simulation of rounds with the runtime's staleness recursion; the decaying counts of a run."""

from __future__ import annotations

import random

import pytest

from drafters.base.serving import ServingSettings
from drafters.eagle3_ssd.speed import staleness
from train.config import LossSettings
from train.objective.visits import Rates, depth_weights, rates, remember, visits

K, MAX_SHIFT = 3, 8
DEPTHS = MAX_SHIFT + K + 1
RATES = Rates(
    [0.7 - 0.04 * d for d in range(DEPTHS)],
    [0.9 - 0.05 * d for d in range(DEPTHS)],
    [0.2 - 0.01 * d for d in range(DEPTHS)],
)


def simulated(rounds: int, refresh: int) -> tuple[list[float], list[float], list[float]]:
    """Drafts, forks and shifts per round: outcomes drawn one by one, D_r from `drafters.eagle3_ssd.speed`."""
    draw = random.Random(0)
    drafts, forks, shifts = ([0] * (DEPTHS + K) for _ in range(3))
    stale, shift = staleness((0,) * (K + 1), 0, False, K, refresh), 0
    for _ in range(rounds):
        shifts[shift] += 1
        accepted = 0
        for m in range(K):
            drafts[shift + m] += 1
        while accepted < K:
            forks[stale[accepted]] += 1
            if draw.random() >= RATES.correct[shift + accepted]:
                break
            accepted += 1
        fork = stale[accepted]
        if accepted == K:
            drafts[fork] += 1
            hit = draw.random() < RATES.listed[fork]
        else:
            hit = draw.random() < RATES.found[fork] / (1 - RATES.correct[fork])
        shift = min(fork + 1, MAX_SHIFT) if hit else 0
        stale = staleness(stale, accepted, hit, K, refresh)
        stale = tuple(d if d == j else j + shift for j, d in enumerate(stale))
    return tuple([n / rounds for n in numbers[:DEPTHS]] for numbers in (drafts, forks, shifts))  # type: ignore[return-value]


@pytest.mark.parametrize("refresh", [0, 1])
def test_visits_are_those_of_simulated_rounds(refresh: int) -> None:
    found = visits(RATES, K, MAX_SHIFT, refresh)
    drafts, forks, shifts = simulated(60_000, refresh)
    assert found.drafts == pytest.approx(drafts, abs=0.01)
    assert found.forks == pytest.approx(forks, abs=0.01)
    assert found.shifts == pytest.approx(shifts[: MAX_SHIFT + 1], abs=0.01)
    assert sum(found.shifts) == pytest.approx(1.0) and found.shifts[4] > 0.05, "a run of hits is seen"
    assert found.reach[0] == pytest.approx([1.0, 0.7, 0.7 * 0.66, 0.7 * 0.66 * 0.62])


def test_a_drafter_that_is_always_right_and_cached_stays_at_the_largest_shift() -> None:
    found = visits(Rates([1.0] * DEPTHS, [1.0] * DEPTHS, [0.0] * DEPTHS), K, MAX_SHIFT)
    assert found.shifts == pytest.approx([0.0] * MAX_SHIFT + [1.0])
    assert found.drafts[MAX_SHIFT:] == pytest.approx([1.0] * (K + 1))


def test_a_drafter_that_never_hits_visits_what_a_jit_round_does() -> None:
    found = visits(Rates([0.5] * DEPTHS, [0.0] * DEPTHS, [0.0] * DEPTHS), K, MAX_SHIFT)
    assert found.drafts == pytest.approx([1.0] * K + [0.125] + [0.0] * MAX_SHIFT)
    assert found.forks == pytest.approx([1.0, 0.5, 0.25] + [0.0] * (MAX_SHIFT + 1))


def test_weights_by_kind() -> None:
    serving = ServingSettings(lookahead=K)
    assert depth_weights(LossSettings(depth_weights="flat"), serving, 2, ()).base == [1.0, 1.0, 1.0]
    assert depth_weights(LossSettings(depth_weights="decay", gamma=0.5), serving, 2, ()).bonus == [1.0, 0.5, 0.25]
    settings = LossSettings(depth_weights="visited")
    tally = tuple((1000.0, 600.0, 800.0, 250.0) for _ in range(12))
    weights = depth_weights(settings, serving, 11, tally)
    seen = visits(rates(tally, 12), K, 8)
    assert sum(weights.base) == pytest.approx(12) and len(weights.base) == len(weights.bonus) == 12
    assert weights.base == pytest.approx([12 / sum(seen.drafts) * value for value in seen.drafts])
    assert weights.bonus == pytest.approx([12 / sum(seen.drafts) * value for value in seen.forks])
    shallow = depth_weights(settings, serving, 1, ())
    assert shallow.base == pytest.approx([1.0, 1.0]), "shallower than one speculation: every depth drafts each round"


def test_the_tally_forgets_slowly_and_deeper_depths_start_from_their_neighbour() -> None:
    tally = remember((), [[10.0, 5.0, 8.0, 2.0]])
    tally = remember(tally, [[10.0, 5.0, 8.0, 2.0], [4.0, 1.0, 2.0, 1.0]])
    assert tally[0] == pytest.approx((19.8, 9.9, 15.84, 3.96)) and tally[1] == (4.0, 1.0, 2.0, 1.0)
    measured = rates(tally, 4)
    assert measured.correct == pytest.approx([10.9 / 21.8, 2 / 6, 2 / 6, 2 / 6])
    assert measured.listed == pytest.approx([16.84 / 21.8, 0.5, 0.5, 0.5])
    assert measured.found == pytest.approx([4.46 / 21.8, 0.25, 0.25, 0.25])
    assert rates((), 2).correct == (0.5, 0.5)
