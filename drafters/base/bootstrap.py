"""Percentile bootstrap: the 95 % interval of a statistic when prompts are drawn again with replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Statistic = Callable[[Any], Any]  # prompt indices [S, N] of S samples -> the statistic [S] of each sample


class Interval(NamedTuple):
    """A figure with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def bootstrap_interval(statistic: Statistic, prompts: int, resamples: int = 2000, seed: int = 0) -> Interval | None:
    """The statistic of all prompts, and the 2.5th and 97.5th percentile of the same statistic over `resamples`
    samples.

    A sample holds as many prompts as there are, drawn with replacement; a statistic of several runs sees the same
    indices for all of them, so what they gave for one prompt stays together. Samples whose statistic is not finite
    (nothing to divide by) are left out. None where there are no prompts or the statistic of all of them is not finite.
    """
    if not prompts:
        return None
    drawn_SN = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
    with np.errstate(divide="ignore", invalid="ignore"):
        value, samples_S = float(statistic(np.arange(prompts)[None])[0]), statistic(drawn_SN)
    if not np.isfinite(value):
        return None
    low, high = np.percentile(samples_S[np.isfinite(samples_S)], [2.5, 97.5])
    return Interval(value, float(low), float(high))
