"""The settings that one drafter works by, and the sizes that follow from them."""

from __future__ import annotations

from typing import NamedTuple

from infer.config import EngineSettings, Mode
from infer.draft.fallback import Fallback


class DraftPlan(NamedTuple):
    """The settings a drafter works by. In mode sd it drafts when asked and prepares nothing."""

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
    def of(settings: EngineSettings, mode: Mode) -> DraftPlan:
        """The drafter's part of the engine's settings; a synchronous drafter answers everything by drafting now."""
        fallback = Fallback.JIT if mode is Mode.SD else Fallback(settings.fallback)
        jit = settings.lookahead if mode is Mode.SD else settings.fallback_lookahead or settings.lookahead
        shared = {
            name: getattr(settings, name)
            for name in DraftPlan._fields
            if name not in ("mode", "fallback", "jit_lookahead")
        }
        return DraftPlan(mode=mode, fallback=fallback, jit_lookahead=jit, **shared)

    @property
    def scratch_tokens(self) -> int:
        """Keys that a request needs behind its own: the in-flight slots, and a tree."""
        return self.lookahead * (1 + self.budget)

    @property
    def read_tokens(self) -> int:
        """Slots of a prompt that are written while others wait; never less than what a verification may add."""
        return max(self.prefill_tokens, 2 * (self.lookahead + 1))

    @property
    def region_tokens(self) -> int:
        """Keys of the longest request."""
        return self.max_model_len + self.scratch_tokens
