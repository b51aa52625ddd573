"""Figures out of rounds made by hand."""

from __future__ import annotations

import pytest
import torch

from train.validation.round_replay import Round
from train.validation.served_drafting import AnswerSpan
from train.validation.serving_figures import (
    RECALL_SIZES,
    by_position,
    confidence_pairs,
    fit_law,
    hit_rate_of,
    retention_of,
    tables,
)


def made(
    accepted: int,
    fresh: int = 0,
    hit: bool = False,
    place: int | None = 0,
    slot: int = 0,
    sure: tuple[float, ...] = (),
) -> Round:
    return Round(slot, 2, accepted, fresh, hit, place, sure)


def test_tables_are_shares() -> None:
    found = tables([made(0), made(0, place=2), made(2, place=None), made(2)], 2)
    assert found is not None and found.reach == (0.5, 0.0, 0.5)
    assert found.recall[0][:4] == (0.5, 0.5, 1.0, 1.0) and len(found.recall[0]) == len(RECALL_SIZES)
    assert found.recall[2][:2] == (0.5, 0.5)
    assert found.recall[1][:3] == pytest.approx((0.5, 0.5, 0.75)), "never seen: the average of the others"
    assert tables([], 2) is None


def test_the_law_is_found_in_rounds_that_follow_it() -> None:
    """miss(F) = 0.8 F^-0.5 at k < K and 0.4 F^-0.5 at k = K; each token accepted with probability 0.75."""
    rounds = []
    for k, share, scale in ((0, 4, 0.8), (1, 3, 0.8), (2, 9, 0.4)):
        missed = [scale * size**-0.5 for size in range(1, 200)]
        number = 2_000 * share
        places = [
            next((i for i, miss in enumerate(missed) if u >= miss), None)
            for u in ((n + 0.5) / number for n in range(number))
        ]
        rounds += [made(k, place=place) for place in places]
    law = fit_law(rounds, 2)
    assert law is not None
    assert (law.a, law.r, law.miss_rejected, law.miss_accepted) == pytest.approx((0.75, 0.5, 0.8, 0.4), rel=0.01)
    assert fit_law([], 2) is None


def test_only_judged_tokens_have_a_confidence() -> None:
    rounds = [made(1, sure=(0.9, 0.4)), made(2, sure=(0.8, 0.7)), made(0, sure=(0.3,))]
    assert confidence_pairs(rounds) == ([0.9, 0.4, 0.8, 0.7, 0.3], [True, False, True, True, False])


def test_retention_and_hit_rate_over_answers() -> None:
    replayed = [[made(1, 1), made(1, 2, True), made(0, 2, False)], [made(2, 2), made(2, 2, True)], []]
    kept = retention_of(replayed)
    assert kept is not None and kept.value == pytest.approx((2 + 3) / (3 + 3))
    assert hit_rate_of(replayed) == pytest.approx(2 / 3), "the first round of an answer looks nothing up"
    assert retention_of([[made(1, 1)]]) is None and hit_rate_of([[made(1, 1)]]) is None


def test_buckets_of_positions_double() -> None:
    places = (0, 127, 128, 255, 256, 511, 512)
    rounds = [made(i % 3, slot=slot) for i, slot in enumerate(places)]
    found = by_position([AnswerSpan(0, 1, 600)], [rounds], [rounds[:1]], torch.arange(600)[None])
    assert [(b["from"], b["to"], b["rounds"]) for b in found] == [
        (0, 128, 2),
        (128, 256, 2),
        (256, 512, 2),
        (512, 1024, 1),
    ]
    assert [b["tau_fresh"] for b in found] == [1.5, 2.0, 2.5, 1.0]
    assert [b["tau_lagged"] for b in found] == [1.0, None, None, None]
