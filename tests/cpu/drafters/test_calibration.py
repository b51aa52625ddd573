"""Calibration of a drafter's confidence finds the law that made the data, and stays sane where there are few."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drafters.eagle3_ssd.calibration import Calibration, fit, reliability


def drawn(law: Calibration, count: int) -> tuple[list[float], list[bool]]:
    generator = np.random.default_rng(1)
    confidences = generator.uniform(0.02, 0.98, count)
    return confidences.tolist(), [
        bool(u < law.probability(c)) for u, c in zip(generator.uniform(size=count), confidences, strict=True)
    ]


@pytest.mark.parametrize("law", [Calibration(1.0, 0.0), Calibration(0.6, -0.4), Calibration(1.7, 0.8)])
def test_fit_finds_the_law(law: Calibration) -> None:
    found = fit(*drawn(law, 20_000))
    assert found is not None and found == pytest.approx(law, abs=0.08)


def test_probability_by_hand() -> None:
    assert Calibration(1.0, 0.0).probability(0.3) == pytest.approx(0.3)
    assert Calibration(2.0, 0.0).probability(0.75) == pytest.approx(0.9)  # odds 3 squared
    assert Calibration(1.0, math.log(3)).probability(0.5) == pytest.approx(0.75)
    assert 0 < Calibration(1.0, 0.0).probability(0.0) < 1e-5 < 1 - 1e-5 < Calibration(1.0, 0.0).probability(1.0) < 1


def test_few_or_separable_observations_stay_near_what_the_drafter_says() -> None:
    assert fit([], []) is None
    one = fit([0.7], [True])
    assert one is not None and 0.7 < one.probability(0.7) < 0.85
    separable = fit([0.1, 0.2, 0.8, 0.9] * 50, [False, False, True, True] * 50)
    assert separable is not None and 1 < separable.slope < 20 and separable.probability(0.9) > 0.97


def test_reliability_bins_hold_equal_numbers() -> None:
    confidences, accepted = drawn(Calibration(1.0, 0.0), 5_000)
    bins = reliability(confidences, accepted, 10)
    assert [b.number for b in bins] == [500] * 10
    assert all(b.accepted == pytest.approx(b.confidence, abs=0.08) for b in bins), "a calibrated drafter"
    assert reliability([0.5, 0.1], [True, False]) == [(0.1, 0.0, 1), (0.5, 1.0, 1)] and reliability([], []) == []
