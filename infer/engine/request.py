"""Requests: sampling parameters, the mutable record of a running request, and what a step returns.

`Request` is the one mutable record of the runtime, and `Request.commit` the only writer of its tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from drafters.base.errors import UserError
from infer.ipc.messages import Source
from infer.kernels.sampling.keyed_random import derived_seed
from infer.kernels.sampling.params import Sampling
from infer.kernels.sampling.verdict import TokenLogprob
from infer.text.detokenize import AnswerText

if TYPE_CHECKING:
    from drafters.targets.target import Target
    from infer.text.grammar import Grammars, GrammarState


MOST_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a request ended: a stop token or string, `max_new_tokens`, or the user's cancel."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"


@dataclass(frozen=True)
class SamplingParams:
    """What the user asks of one answer. The end tokens of the target always stop unless `ignore_eos`.

    * `temperature` 0 is greedy. None is greedy too, unless top_k, top_p or min_p is given: these have no effect on
      greedy answers, so the temperature is then 1.
    * `logit_bias` adds to the logits of token ids. The repetition penalty (1 is none) counts the prompt's tokens, the
      presence and the frequency penalty (0 is none) only those of the answer. A greedy request takes the argmax of the
      changed logits.
    * `seed` None: a random one for each request.
    * `grammar` (made by a function of `infer.text.grammar`) constrains the output; the end token comes where it may
      end.
    * `logprobs` asks for the log-probability of each token and of that many likeliest ones, as the target itself gives
      them: before bias, penalties, temperature and filters.
    * A string of `stop` ends the answer at the token that completes it; the text ends before it.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "be at least 1")
        _check(
            self.temperature is None or 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "lie in 0..100 (0 is greedy)",
        )
        _check(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "be at least 1, or left out")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "lie above 0 and at most at 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "lie in 0..1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "lie in -2..2")
        _check(
            0 < self.repetition_penalty <= 10,
            "repetition_penalty",
            self.repetition_penalty,
            "lie above 0 and at most at 10",
        )
        for token, bias in self.logit_bias:
            _check(-100 <= bias <= 100, f"logit_bias of token {token}", bias, "lie in -100..100")
        _check("" not in self.stop, "stop", self.stop, "hold strings with at least one character")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"lie in 0..{MOST_LOGPROBS}",
        )
        _check(
            not (self.grammar and self.ignore_eos),
            "ignore_eos",
            True,
            "be left out beside a grammar, which says where the text ends",
        )
        ids = [token for token, _ in self.logit_bias]
        _check(len(set(ids)) == len(ids), "logit_bias", ids, "name each token once")

    @property
    def sampling(self) -> Sampling:
        """The part that verification and drafting need. `seed` has to be set by now, except where nothing is drawn."""
        temperature = self.temperature
        if temperature is None:
            temperature = 1.0 if self.top_k is not None or self.top_p < 1 or self.min_p > 0 else 0.0
        return Sampling(
            temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed or 0,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            self.logit_bias,
            self.grammar,
        )

    def seeded(self) -> SamplingParams:
        """The same with a seed: its own, or a random one where it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def choices(self, count: int) -> list[SamplingParams]:
        """The parameters of several answers to one prompt: the first as asked, the others with seeds that follow from
        its seed.
        """
        return [self if self.seed is None else replace(self, seed=derived_seed(self.seed, i)) for i in range(count)]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `UserError` where `params` name a token that the target does not have."""
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in ids:
            _check(0 <= token < vocab_size, name, token, f"name token ids of this target, 0..{vocab_size - 1}")


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise UserError(f"{name} = {value}: has to {rule}")


@dataclass(frozen=True)
class RoundRecord:
    """One verification of one request, as evaluation counts it. Times in seconds; `wait` is the target's wait for the
    speculation.
    """

    source: Source
    offered: int  # drafted tokens that were verified
    accepted: int
    emitted: int  # committed tokens, bonus included, before a stop trims them
    verify: float
    wait: float
    draft: float  # busy time of the drafter for this round (ssd: answer and preparation)


@dataclass
class Request:
    """A running request. `tokens[-1]` is the newest one: sampled, shown, and not yet in the target's KV."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int  # prompt and answer together, from max_new_tokens and the context limit
    tokens: list[int] = field(default_factory=list)
    watch: AnswerText | None = None  # detokenises the answer to find stop strings
    grammar: GrammarState | None = None  # after `tokens`
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the answer's tokens, where they are asked for
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def new_tokens(self) -> list[int]:
        """The answer so far, the stop token included."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def room(self) -> int:
        """How many more tokens the limit allows."""
        return self.max_tokens - len(self.tokens)

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[int]:
        """Append the tokens of a round, trimmed at the first stop and at the limit. Returns what was kept.

        A stop inside the limit wins over the limit: limit 3, tokens [7, STOP, 8, 9] keeps [7, STOP], reason "stop". A
        stop string ends the answer at the token that completes it, however far before that token it began.
        """
        assert self.finish_reason is None, f"request {self.id} has ended ({self.finish_reason})"
        kept: list[int] = []
        for token in tokens[: self.room]:
            kept.append(token)
            if token in self.stop_ids or (self.watch is not None and self.watch.completes_stop(token)):
                self.finish_reason = FinishReason.STOP
                break
        self.tokens += kept
        if self.grammar is not None:
            self.grammar.advance(kept)
        self.logprobs += logprobs[: len(kept)]
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        return kept


def new_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    target: Target,
    grammars: Grammars,
) -> Request:
    """A request to `target` that may grow to `max_tokens`. Raises `UserError` where `params` name what the target does
    not have.

    A stop string that is a special token, such as "<|im_end|>", also stops as a token: special tokens have no text.
    """
    check_token_ids(params, target.facts.vocab_size)
    names = target.tokenizer.all_special_tokens if params.stop else ()
    special = {text: target.tokenizer.convert_tokens_to_ids(text) for text in names}
    stops = {*params.stop_token_ids, *(special[text] for text in params.stop if text in special)}
    if not params.ignore_eos:
        stops.update(target.facts.end_token_ids)
    watch = AnswerText(target.tokenizer, params.stop) if params.stop else None
    grammar = None if params.grammar is None else grammars.start(params.grammar)
    return Request(
        request_id, tuple(prompt_ids), params.seeded(), frozenset(stops), max_tokens, list(prompt_ids), watch, grammar
    )


@dataclass(frozen=True)
class RequestOutput:
    """What one engine step gave one request. `request` is complete when `finish_reason` is not None."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    request: Request
