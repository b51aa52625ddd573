"""What a verification is given by the drafter, and what it decides.

K drafted tokens, D draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLogprob(NamedTuple):
    """A committed token with its natural log-probability, and the likeliest tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Proposal(NamedTuple):
    """The distributions the drafted tokens were really drawn from, bit for bit."""

    probs_KD: Tensor  # fp32, rows sum to 1
    draft_to_target_D: Tensor  # int64, strictly increasing target ids of the draft vocabulary


class Verdict(NamedTuple):
    """The outcome of one verification: the first `num_accepted` drafted tokens stay, then comes `bonus_token`."""

    num_accepted: int
    bonus_token: int
    logprobs: tuple[TokenLogprob, ...] = ()  # of these tokens, where the request asks for them
