"""The bootstrap interval: the statistic of all prompts, percentiles of samples of whole prompts, and what has none."""

from __future__ import annotations

import numpy as np

from drafters.base.bootstrap import bootstrap_interval


def test_the_interval_is_made_of_percentiles_of_resampled_statistics() -> None:
    values_N = np.array([1.0, 2.0, 4.0, 8.0])
    interval = bootstrap_interval(lambda drawn_SN: values_N[drawn_SN].mean(1), 4, resamples=500, seed=3)
    assert interval is not None and interval.value == 3.75
    samples = np.random.default_rng(3).integers(4, size=(500, 4))
    means = sorted(float(sum(values_N[i] for i in sample)) / 4 for sample in samples)
    assert (interval.low, interval.high) == tuple(np.percentile(means, [2.5, 97.5]))


def test_samples_without_a_finite_statistic_are_left_out() -> None:
    above, below = np.array([3, 0]), np.array([1, 0])
    interval = bootstrap_interval(lambda drawn_SN: above[drawn_SN].sum(1) / below[drawn_SN].sum(1), 2)
    assert interval == (3.0, 3.0, 3.0)  # a quarter of the samples holds the second prompt only: 0 / 0


def test_nothing_to_count_has_no_interval() -> None:
    assert bootstrap_interval(lambda drawn_SN: drawn_SN.sum(1), 0) is None
    zero = np.zeros(3)
    assert bootstrap_interval(lambda drawn_SN: zero[drawn_SN].sum(1) / zero[drawn_SN].sum(1), 3) is None
