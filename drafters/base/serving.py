"""Settings of speculation: the `serving:` block that training, validation and serving recipes share (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from drafters.base.settings import Settings


class ServingSettings(Settings):
    """How a drafter is served: what SSD drafts for each verification, prepares beside it, and does after a miss.

    Serving follows it; training takes from it which depths and outcomes serving visits, and validation what it
    replays.
    """

    lookahead: int = Field(default=5, ge=1, le=32, description="K: tokens drafted for each verification")
    budget: int = Field(default=24, ge=1, le=1024, description="branches prepared for each request and round (ssd)")
    policy: Literal["uniform", "geometric"] = Field(
        default="geometric", description="spread of the budget: uniform or geometric (ssd)"
    )
    fallback: Literal["jit", "ngram", "none"] = Field(
        default="jit", description="answer to a miss: jit (draft now), ngram or none (ssd)"
    )
    fallback_lookahead: int | None = Field(
        default=None, ge=1, le=32, description="tokens jit drafts after a miss (default: lookahead)"
    )
    refresh: int = Field(
        default=0, ge=0, description="extra passes that renew the features of tokens in flight, 0..K (ssd)"
    )

    @model_validator(mode="after")
    def _fits(self) -> ServingSettings:
        if self.refresh > self.lookahead:
            raise ValueError(f"refresh = {self.refresh} is more than lookahead = {self.lookahead}; give 0..lookahead")
        if self.fallback_lookahead is not None and self.fallback_lookahead > self.lookahead:
            raise ValueError(
                f"fallback_lookahead = {self.fallback_lookahead} is more than lookahead = {self.lookahead}; give less"
            )
        return self

    @property
    def mean_fan_out(self) -> int:
        """F: the bonus tokens prepared for each k in 0..K when the budget is spread evenly; at least 1."""
        return max(1, self.budget // (self.lookahead + 1))
