"""What may be asked of an answer: mistakes are named, an unset temperature or seed means what a user expects."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafters.base.errors import UserError
from drafters.targets.target import load_target
from infer.engine.request import FinishReason, Request, SamplingParams, check_token_ids, new_request
from infer.kernels.sampling.verdict import TokenLogprob
from infer.text.detokenize import AnswerText
from infer.text.grammar import Grammars, Vocabulary
from tests.tiny import save_tiny_target, tiny_tokenizer


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
        ({"logprobs": 21}, "logprobs = 21"),
        ({"stop": ("a", "")}, "stop = "),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias of token 3 = 101.0"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "name each token once"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"logit_bias": ((99, 1.0),)}, {"stop_token_ids": (5, -1)}])
def test_tokens_that_the_target_does_not_have_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=rf"{next(iter(options))} = (99|-1): has to name token ids of this target, 0..98"
    ):
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


TEXT = "one EN two END three END"
IDS = tiny_tokenizer()(TEXT)["input_ids"]  # one token a character
LAST = TEXT.index("END") + len("END")  # tokens up to the one that completes the stop string


def _watched(limit: int) -> Request:
    watch = AnswerText(tiny_tokenizer(), ("never", "END"))
    return Request("r", (1, 2), SamplingParams(logprobs=0), frozenset({0}), 2 + limit, [1, 2], watch)


@pytest.mark.parametrize("size", range(1, 17))
def test_a_stop_string_ends_the_answer_wherever_a_round_ends(size: int) -> None:
    """Early in a large block, over the border of two rounds, over three: the same tokens and log-probabilities."""
    request = _watched(limit=len(IDS))
    logprobs = [TokenLogprob(token, -float(i)) for i, token in enumerate(IDS)]
    kept: list[int] = []
    for start in range(0, len(IDS), size):
        if request.finish_reason is None:
            kept += request.commit(IDS[start : start + size], logprobs[start : start + size])
    assert kept == request.new_tokens == IDS[:LAST]
    assert request.logprobs == logprobs[:LAST]
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("limit", "reason"), [(LAST - 1, FinishReason.LENGTH), (LAST, FinishReason.STOP), (LAST + 1, FinishReason.STOP)]
)
def test_a_stop_string_at_the_limit(limit: int, reason: FinishReason) -> None:
    request = _watched(limit)
    assert request.commit(IDS) == IDS[: min(limit, LAST)]
    assert request.finish_reason is reason


def test_a_special_token_given_as_a_stop_string_stops_as_a_token_and_as_text(tmp_path: Path) -> None:
    target = load_target(str(save_tiny_target(tmp_path)), "float32")
    grammars = Grammars(partial(Vocabulary.of, target))
    im_start = target.tokenizer.convert_tokens_to_ids("<|im_start|>")

    def new() -> Request:
        return new_request("r", [5], SamplingParams(stop=("<|im_start|>", "x"), ignore_eos=True), 99, target, grammars)

    assert (request := new()).stop_ids == {im_start}
    assert request.commit([7, im_start, 9]) == [7, im_start]
    spelled = [target.tokenizer.convert_tokens_to_ids(char) for char in "<|im_start|>"]
    assert new().commit([7, *spelled, 9]) == [7, *spelled]


def test_choices_have_seeds_of_their_own_that_follow_from_the_first() -> None:
    seeds = [params.seed for params in SamplingParams(temperature=1.0, seed=7).choices(5)]
    assert seeds[0] == 7 and len(set(seeds)) == 5
    assert seeds[:3] == [params.seed for params in SamplingParams(temperature=1.0, seed=7).choices(3)]
    assert [params.seed for params in SamplingParams(temperature=1.0).choices(2)] == [None, None]
