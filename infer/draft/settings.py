"""The settings that one drafter works by, and the sizes that follow from them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from infer.config import EngineSettings, Mode


class Fallback(StrEnum):
    """How a look-up that misses is answered, per request (infer/draft/README.md, section 4)."""

    JIT = "jit"  # draft now, for the missed requests only
    NGRAM = "ngram"  # prompt look-up in the request's own tokens, at once
    NONE = "none"  # an empty speculation: a plain one-token step


class DraftSettings(NamedTuple):
    """The drafter's part of the engine's settings. In mode sd it drafts when asked and prepares nothing."""

    mode: Mode
    lookahead: int
    jit_lookahead: int  # tokens drafted while the target waits: each costs it a step, so fewer may serve better
    budget: int
    policy: str
    fallback: Fallback
    refresh: int
    saguaro_c: float
    batch_size: int
    max_model_len: int
    prefix_cache: bool = True
    prefill_tokens: int = 256

    @staticmethod
    def of(settings: EngineSettings, mode: Mode) -> DraftSettings:
        """The drafter's part of `settings`. A synchronous drafter (mode sd) answers everything by drafting now."""
        fallback = Fallback.JIT if mode is Mode.SD else Fallback(settings.fallback)
        jit = settings.lookahead if mode is Mode.SD else settings.fallback_lookahead or settings.lookahead
        derived = {"mode": mode, "fallback": fallback, "jit_lookahead": jit}
        shared = {name: getattr(settings, name) for name in DraftSettings._fields if name not in derived}
        return DraftSettings(**derived, **shared)

    @property
    def scratch_tokens(self) -> int:
        """KV slots that a request needs behind its own tokens: the in-flight slots and a tree, K (1 + budget)."""
        return self.lookahead * (1 + self.budget)

    @property
    def read_tokens(self) -> int:
        """Slots of a prompt that are written while others wait; never less than what a verification may add."""
        return max(self.prefill_tokens, 2 * (self.lookahead + 1))

    @property
    def region_tokens(self) -> int:
        """KV slots of the longest request, scratch included."""
        return self.max_model_len + self.scratch_tokens
