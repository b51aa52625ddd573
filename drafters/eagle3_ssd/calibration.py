"""Platt scaling of the drafter's confidence: P(token accepted) from the probability that the drafter gave it
(torch-free).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CLIP = 1e-6  # confidences are kept that far from 0 and 1, where their logit would be infinite
PRIOR = 1.0  # weight, in observations, of slope 1 and intercept 0: few or separable observations have a fit too


class Calibration(NamedTuple):
    """P(accepted) = sigmoid(slope * logit(confidence) + intercept).

    Slope 1 and intercept 0 are those of a drafter whose probabilities are calibrated already.
    """

    slope: float
    intercept: float

    def probability(self, confidence: float) -> float:
        """P(a token drafted with probability `confidence` is accepted, given that those before it were)."""
        return 1 / (1 + math.exp(-(self.slope * float(_logit(np.array(confidence))) + self.intercept)))


def fit(confidences: Sequence[float], accepted: Sequence[bool]) -> Calibration | None:
    """Logistic regression by Newton's method; None without observations."""
    if not len(confidences):
        return None
    x, y = _logit(np.asarray(confidences, dtype=np.float64)), np.asarray(accepted, dtype=np.float64)
    inputs, prior = np.stack([x, np.ones_like(x)], axis=1), np.array([1.0, 0.0])
    theta = prior.copy()
    for _ in range(50):
        p = 1 / (1 + np.exp(-inputs @ theta))
        gradient = inputs.T @ (p - y) + PRIOR * (theta - prior)
        curvature = (inputs.T * (p * (1 - p))) @ inputs + PRIOR * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        theta = theta - step
        if float(np.abs(step).max()) < 1e-9:
            break
    return Calibration(float(theta[0]), float(theta[1]))


class Bin(NamedTuple):
    """One bin of a reliability diagram."""

    confidence: float  # mean
    accepted: float  # share
    number: int


def reliability(confidences: Sequence[float], accepted: Sequence[bool], bins: int = 10) -> list[Bin]:
    """Bins of about equal number, by rising confidence."""
    order = np.argsort(np.asarray(confidences), kind="stable")
    parts = [part for part in np.array_split(order, min(bins, len(order)) or 1) if len(part)]
    x, y = np.asarray(confidences, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
    return [Bin(float(x[part].mean()), float(y[part].mean()), len(part)) for part in parts]


def _logit(p: np.ndarray) -> np.ndarray:
    clipped = np.clip(p, CLIP, 1 - CLIP)
    return np.log(clipped) - np.log1p(-clipped)
