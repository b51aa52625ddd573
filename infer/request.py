"""A request and what becomes of it. `Request` is the one mutable record of the runtime, and `commit` its one writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from drafters.errors import UserError
from infer.kernels.sample import Sampling


class FinishReason(StrEnum):
    """Why a request ended: a stop token, `max_new_tokens`, or the user's cancel."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"


class Source(StrEnum):
    """Where the speculation of a round came from. FIRST is a request's first one: there was nothing to look up."""

    HIT = "hit"
    JIT = "jit"
    NGRAM = "ngram"
    NONE = "none"
    FIRST = "first"
    SYNC = "sync"  # mode sd


@dataclass(frozen=True)
class SamplingParams:
    """What the user asks of one answer. Temperature 0 is greedy; the end tokens of the target always stop unless `ignore_eos`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {self.max_new_tokens}: has to be at least 1")
        if not 0 <= self.temperature <= 100:
            raise UserError(f"temperature = {self.temperature}: has to lie in 0..100 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k = {self.top_k}: has to be at least 1, or left out")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: has to lie above 0 and at most at 1")

    @property
    def sampling(self) -> Sampling:
        """The part that verification and drafting need."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class RoundRecord:
    """One verification of one request, as evaluation counts it. Times in seconds; `wait` is the target's wait for the speculation."""

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
        """Tokens that may still come."""
        return self.max_tokens - len(self.tokens)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append what a round produced, trimmed at the first stop token and at the limit. Returns what was kept.

        A stop token inside the limit wins over the limit: limit 3, tokens [7, STOP, 8, 9] keeps [7, STOP], reason "stop".
        """
        assert self.finish_reason is None, f"request {self.id} has ended ({self.finish_reason})"
        kept: list[int] = []
        for token in tokens[: self.room]:
            kept.append(token)
            if token in self.stop_ids:
                self.finish_reason = FinishReason.STOP
                break
        self.tokens += kept
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        return kept


@dataclass(frozen=True)
class RequestOutput:
    """What one engine step gave one request. `request` is complete when `finish_reason` is not None."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    request: Request
