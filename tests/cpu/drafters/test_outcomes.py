"""Which outcomes are prepared: numbering, selection, and how a budget is spread."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base.errors import UserError
from drafters.eagle3_ssd.card import DrafterCard, Measured, OutcomeLaw
from drafters.eagle3_ssd.outcomes import (
    OutcomeStatistics,
    Policy,
    PowerLaw,
    expected_hit_rate,
    fan_out,
    find,
    fit_power_law,
    geometric,
    geometric_reach,
    largest_remainder,
    measured,
    recall_at,
    resize,
    select,
    select_many,
    statistics_of,
    uniform,
)

LAW = PowerLaw(inner=0.8, last=0.5, exponent=0.7)


def law_table(lookahead: int, law: PowerLaw, longest: int) -> list[list[float]]:
    """recall_k@F of a drafter that follows the law exactly."""
    scales = [law.inner] * lookahead + [law.last]
    return [[1 - min(1.0, a * f**-law.exponent) for f in range(1, longest + 1)] for a in scales]


def compositions(total: int, parts: int):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


# Selection and numbering


def test_a_worked_example() -> None:
    """K = 2, F = (2, 1, 2); the likeliest token at k = 0 and k = 1 is the one in flight, so the next ones stand in."""
    logits = torch.tensor([[9.0, 8.0, 7.0, 0.0], [0.0, 8.0, 7.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    branches = select(logits, [0, 3], (2, 1, 2))
    assert branches.ks == (0, 0, 1, 2, 2)
    assert branches.tokens == (1, 2, 1, 3, 2)
    assert branches.offsets == (0, 2, 3, 5)
    assert [find(branches, *outcome) for outcome in ((0, 2), (1, 1), (2, 3), (2, 2))] == [1, 2, 3, 4]
    assert [find(branches, *outcome) for outcome in ((0, 0), (1, 2), (2, 1), (3, 1))] == [None] * 4


def test_at_full_acceptance_nothing_is_excluded() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert select(logits, [], (2,)).tokens == (2, 1)


def test_tokens_are_target_ids_and_tokens_outside_the_draft_vocabulary_exclude_nothing() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    ids = torch.tensor([10, 25, 40])
    assert select(logits, [25], (2, 1), ids).tokens == (10, 40, 40)
    assert select(logits, [26], (2, 1), ids).tokens == (10, 25, 40)


def test_lowered_tokens_come_first_in_their_own_order() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0], [9.0, 8.0, 7.0, 6.0]])
    assert select(logits, [1], (3, 2), lowered=[[3, 1]]).tokens == (3, 0, 2, 0, 1)


def test_a_fan_out_of_zero_and_a_vocabulary_that_is_too_small() -> None:
    branches = select(torch.tensor([[3.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), [0, 1], (5, 0, 5))
    assert branches.ks == (0, 2, 2)
    assert branches.tokens == (1, 0, 1)
    assert find(branches, 1, 0) is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_select_equals_a_plain_ranking(seed: int, lengths: list[int], data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (sum(lengths) + len(lengths), 30), generator=generator).float()
    speculations = [torch.randint(30, (length,), generator=generator).tolist() for length in lengths]
    fan_outs = [data.draw(st.lists(st.integers(0, 6), min_size=n + 1, max_size=n + 1)) for n in lengths]
    start = 0
    for branches, speculation, counts in zip(
        select_many(logits, speculations, fan_outs), speculations, fan_outs, strict=True
    ):
        expected = []
        for k, count in enumerate(counts):
            ranking = sorted(range(30), key=lambda t, row=logits[start + k]: (-float(row[t]), t))
            expected += [(k, t) for t in ranking if k == len(speculation) or t != speculation[k]][:count]
        assert list(zip(branches.ks, branches.tokens, strict=True)) == expected
        assert [find(branches, k, t) for k, t in expected] == list(range(len(expected)))
        start += len(counts)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError):
        select(torch.zeros(2, 5), [1, 2], (1, 1, 1))
    with pytest.raises(AssertionError):
        select(torch.zeros(3, 5), [1, 2], (1, 1))


# Budgets


@settings(deadline=None)
@given(
    lookahead=st.integers(0, 8),
    budget=st.integers(0, 60),
    a=st.floats(0, 1),
    inner=st.floats(0.05, 1),
    last=st.floats(0.05, 1),
    r=st.floats(0, 3),
)
def test_every_policy_spends_the_budget(
    lookahead: int, budget: int, a: float, inner: float, last: float, r: float
) -> None:
    law = PowerLaw(inner, last, r)
    table = law_table(lookahead, law, 8)
    for counts in (
        uniform(lookahead, budget),
        geometric(lookahead, budget, a, law),
        measured(budget, geometric_reach(lookahead, a), table, r),
    ):
        assert len(counts) == lookahead + 1
        assert sum(counts) == budget
        assert min(counts) >= 0


def test_uniform() -> None:
    assert uniform(2, 9) == (3, 3, 3)
    assert uniform(2, 7) == (3, 2, 2)
    assert uniform(3, 2) == (1, 1, 0, 0)


def test_largest_remainder_by_hand() -> None:
    """Shares 2.5, 1.5, 1.0: floors 2, 1, 1 and one left; equal remainders go to the smaller index."""
    assert largest_remainder([5, 3, 2], 5) == (3, 1, 1)
    assert largest_remainder([0.6, 0.3, 0.1], 10) == (6, 3, 1)
    assert largest_remainder([0.0, 1.0], 3) == (0, 3)


@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3),
    total=st.integers(0, 200),
)
def test_largest_remainder_stays_within_one_of_the_share(weights: list[float], total: int) -> None:
    counts = largest_remainder(weights, total)
    assert sum(counts) == total
    assert all(
        abs(count - weight * total / sum(weights)) < 1 + 1e-9 for count, weight in zip(counts, weights, strict=True)
    )


def test_theorem_12() -> None:
    """With equal A: F_k / F_0 = a^(k/(1+r)), F_K / F_0 = a^(K/(1+r)) (1-a)^(-1/(1+r)); a budget this large shows the
    ratios.
    """
    a, r, lookahead = 0.7, 0.5, 4
    counts = geometric(lookahead, 10**8, a, PowerLaw(1.0, 1.0, r))
    ratios = [count / counts[0] for count in counts]
    expected = [a ** (k / (1 + r)) for k in range(lookahead)] + [
        a ** (lookahead / (1 + r)) * (1 - a) ** (-1 / (1 + r))
    ]
    assert ratios == pytest.approx(expected, rel=1e-5)


def test_the_closed_form_at_its_ends() -> None:
    assert geometric(3, 8, 1.0, LAW) == (0, 0, 0, 8)
    assert geometric(3, 8, 0.0, LAW) == (8, 0, 0, 0)
    assert geometric(0, 8, 0.6, LAW) == (8,)


@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("budget", [1, 5, 8, 12])
def test_measured_is_the_best_of_all_allocations_where_gains_fall(a: float, budget: int) -> None:
    reach, table = geometric_reach(3, a), law_table(3, PowerLaw(0.5, 0.3, 0.9), 16)
    best = max(expected_hit_rate(counts, reach, table) for counts in compositions(budget, 4))
    assert expected_hit_rate(measured(budget, reach, table), reach, table) == pytest.approx(best, abs=1e-12)


def test_a_poor_first_choice_does_not_hide_a_good_second_one() -> None:
    """At k = 0 two branches give 0.5 * 0.6; one at a time the first would look worse than a third at k = 1."""
    reach, table = [0.5, 0.5], [[0.05, 0.6, 0.65], [0.5, 0.56, 0.62]]
    assert measured(3, reach, table) == (2, 1)
    best = max(expected_hit_rate(counts, reach, table) for counts in compositions(3, 2))
    assert expected_hit_rate((2, 1), reach, table) == pytest.approx(best)


@pytest.mark.parametrize("a", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("law", [LAW, PowerLaw(0.7, 0.7, 1.0), PowerLaw(0.9, 0.4, 0.5)])
def test_measured_and_closed_form_agree_where_the_tables_follow_the_law(a: float, law: PowerLaw) -> None:
    reach, table = geometric_reach(4, a), law_table(4, law, 100)
    by_table, by_formula = measured(100, reach, table), geometric(4, 100, a, law)
    assert max(abs(x - y) for x, y in zip(by_table, by_formula, strict=True)) <= 1
    assert expected_hit_rate(by_formula, reach, table) == pytest.approx(
        expected_hit_rate(by_table, reach, table), abs=2e-4
    )


def test_geometric_beats_uniform_where_acceptance_is_uneven() -> None:
    reach, table = geometric_reach(5, 0.5), law_table(5, LAW, 30)
    assert (
        expected_hit_rate(geometric(5, 24, 0.5, LAW), reach, table)
        > expected_hit_rate(uniform(5, 24), reach, table) + 0.01
    )


def test_recall_beyond_the_table_follows_the_exponent() -> None:
    assert recall_at([0.5, 0.8], 0) == 0
    assert recall_at([0.5, 0.8], 2) == 0.8
    assert recall_at([0.5, 0.8], 4, tail_exponent=1.0) == pytest.approx(0.9)
    exact = law_table(1, LAW, 64)[0]
    assert recall_at(exact[:8], 40, LAW.exponent) == pytest.approx(exact[39])


def test_expected_hit_rate_by_hand() -> None:
    assert expected_hit_rate((1, 2), [0.6, 0.4], [[0.5, 0.7], [0.6, 0.9]]) == pytest.approx(0.6 * 0.5 + 0.4 * 0.9)


# From measured figures to a fan-out

STATISTICS = OutcomeStatistics(0.6, LAW, (0.4, 0.2, 0.1, 0.3), ((0.5, 0.6), (0.4, 0.5), (0.3, 0.4), (0.7, 0.9)))


def test_resize() -> None:
    assert resize(STATISTICS, 3) == (STATISTICS.reach, STATISTICS.recall)
    reach, recall = resize(STATISTICS, 1)
    assert reach == pytest.approx((0.4, 0.6))
    assert recall == ((0.5, 0.6), (0.7, 0.9))
    assert resize(STATISTICS, 0) == ((1.0,), ((0.7, 0.9),))
    reach, recall = resize(STATISTICS, 5)  # 0.3 / 0.4 of those who got to the third token went on
    assert reach == pytest.approx((0.4, 0.2, 0.1, 0.3 * 0.25, 0.3 * 0.75 * 0.25, 0.3 * 0.75**2))
    assert recall == (*STATISTICS.recall[:3], (0.3, 0.4), (0.3, 0.4), (0.7, 0.9))


@pytest.mark.parametrize("lookahead", range(7))
def test_geometric_takes_the_tables_where_there_are_any(lookahead: int) -> None:
    assert fan_out("geometric", lookahead, 12, STATISTICS) == measured(
        12, *resize(STATISTICS, lookahead), LAW.exponent
    )
    assert fan_out(Policy.GEOMETRIC, lookahead, 12, OutcomeStatistics(0.6, LAW)) == geometric(lookahead, 12, 0.6, LAW)
    assert fan_out("uniform", lookahead, 12) == uniform(lookahead, 12)


def test_geometric_without_figures_is_refused() -> None:
    for statistics in (None, OutcomeStatistics(), OutcomeStatistics(acceptance=0.5)):
        with pytest.raises(UserError, match="policy=uniform"):
            fan_out("geometric", 3, 8, statistics)


def test_the_card_gives_the_figures_for_fresh_and_for_lagged_features() -> None:
    fresh, lagged = (
        Measured(reach=(0.2, 0.8), recall=((0.5,), (0.9,))),
        Measured(reach=(0.4, 0.6), recall=((0.4,), (0.8,))),
    )
    card = DrafterCard(
        target="t",
        target_weight_hash="",
        tokenizer_hash="",
        template_hash="",
        lookahead=1,
        trained_depth=3,
        trained_length=64,
        law=OutcomeLaw(a=0.7, r=0.9, miss_rejected=0.6, miss_accepted=0.3),
        measured_fresh=fresh,
        measured_lagged=lagged,
    )
    assert statistics_of(card, after_hit=False) == OutcomeStatistics(
        0.7, PowerLaw(0.6, 0.3, 0.9), fresh.reach, fresh.recall
    )
    assert statistics_of(card, after_hit=True).reach == lagged.reach
    assert statistics_of(card.model_copy(update={"measured_lagged": None}), after_hit=True).reach == fresh.reach
    nothing = card.model_copy(update={"law": None, "measured_fresh": None, "measured_lagged": None})
    assert statistics_of(nothing, after_hit=True) == OutcomeStatistics()


@given(inner=st.floats(0.05, 0.99), last=st.floats(0.05, 0.99), r=st.floats(0.05, 2.5))
def test_the_fit_finds_the_law(inner: float, last: float, r: float) -> None:
    law = PowerLaw(inner, last, r)
    miss = [[1 - recall for recall in row] for row in law_table(3, law, 8)]
    assert fit_power_law(miss) == pytest.approx(law, rel=1e-6)


def test_points_at_zero_and_at_one_do_not_bend_the_fit() -> None:
    miss = [[1.0, 0.5, 0.5 * (2 / 3), 0.25], [0.4, 0.2, 0.4 / 3, 0.0]]
    assert fit_power_law(miss) == pytest.approx(PowerLaw(1.0, 0.4, 1.0))


@pytest.mark.parametrize("miss", [[[0.0, 0.0], [0.5, 0.2]], [[0.5], [0.5]], [[0.5, 0.4]]])
def test_a_table_that_determines_nothing_gives_none(miss: list[list[float]]) -> None:
    assert fit_power_law(miss) is None


def test_select_is_deterministic_under_ties() -> None:
    logits = torch.zeros(3, 500)
    orders = {select(logits, [0, 1], (3, 3, 3)).tokens for _ in itertools.repeat(None, 3)}
    assert orders == {(1, 2, 3, 0, 2, 3, 0, 1, 2)}
