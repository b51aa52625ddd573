"""What may be asked of an answer: mistakes are named, an unset temperature or seed means what a user expects."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.errors import UserError
from infer.request import FinishReason, Request, SamplingParams, check_token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"presence_penalty": 2.5}, "presence_penalty = 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty = -3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias of token 3 = 101.0"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "name each token once"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"logit_bias": ((99, 1.0),)}, {"stop_token_ids": (5, -1)}])
def test_tokens_that_the_target_does_not_have_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"{next(iter(options))} = (99|-1): has to name token ids of this target, 0..98"):
        check_token_ids(SamplingParams(**options), 99)
    check_token_ids(SamplingParams(logit_bias=((98, 1.0),), stop_token_ids=(0,)), 99)


def test_filters_without_a_temperature_are_not_greedy() -> None:
    assert SamplingParams().sampling.greedy
    assert SamplingParams(presence_penalty=1.0).sampling.greedy
    assert SamplingParams(temperature=0.0, top_k=5).sampling.greedy  # said in so many words
    for params in (SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)):
        assert params.sampling.temperature == 1.0


def test_requests_without_a_seed_get_different_ones() -> None:
    seeds = {SamplingParams(temperature=1.0).seeded().seed for _ in range(20)}
    assert len(seeds) == 20 and None not in seeds
    assert SamplingParams(seed=0).seeded().seed == 0


@pytest.mark.parametrize(
    ("tokens", "limit", "kept", "reason"),
    [
        ([7, 9, 8, 9], 3, [7, 9], FinishReason.STOP),  # the stop lies inside the limit
        ([7, 8, 9], 2, [7, 8], FinishReason.LENGTH),  # and here beyond
        ([7, 9], 2, [7, 9], FinishReason.STOP),  # both at the same token
        ([7, 8], 2, [7, 8], FinishReason.LENGTH),
        ([7], 2, [7], None),
    ],
)
def test_a_round_is_trimmed_at_the_first_stop_and_at_the_limit(
    tokens: list[int], limit: int, kept: list[int], reason: FinishReason | None
) -> None:
    request = Request("r", (1, 2), SamplingParams(), frozenset({9}), 2 + limit, [1, 2])
    assert request.commit(tokens) == kept == request.new_tokens
    assert request.finish_reason is reason
