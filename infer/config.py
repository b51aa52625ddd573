"""Serving settings: one frozen record, the same names in recipes, on the command line and in `results.json`
(torch-free).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from drafters.base.settings import Settings
from drafters.targets.template import TemplateOptions


class Mode(StrEnum):
    """How tokens are made: one by one, with synchronous drafting, or with drafting during verification."""

    AR = "ar"
    SD = "sd"
    SSD = "ssd"


BASELINE = "transformers"  # the label of a run of transformers' own generate, beside those of the modes


class EngineSettings(Settings):
    """What an engine is built from. `lookahead`, `budget` and their like have no effect in modes that do not use them."""

    target: str = Field(description="directory, hub id, .gguf file or builtin:smollm2-135m")
    drafter: str | None = Field(default=None, description="drafter directory (not needed for mode ar)")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="bfloat16 or float32")
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
    saguaro_c: float = Field(
        default=1.0, gt=0, le=1, description="Saguaro's C: below 1 trades acceptance for hits when sampling (ssd)"
    )
    template: TemplateOptions = Field(
        default=TemplateOptions(), description="of the chat template, such as template.enable_thinking=false"
    )
    batch_size: int = Field(default=1, ge=1, description="requests decoded at once")
    max_model_len: int = Field(
        default=2048, ge=16, description="longest request, prompt and answer together, in tokens"
    )
    prefill_tokens: int = Field(
        default=256, ge=1, description="tokens of prompts read in one round beside the decoding requests"
    )
    kv_tokens: int | None = Field(
        default=None, ge=16, description="size of the target's KV pool in tokens (default: by memory_share)"
    )
    memory_share: float = Field(
        default=0.5, gt=0, le=0.95, description="share of the free memory that KV pools without kv_tokens may take"
    )
    prefix_cache: bool = Field(
        default=True, description="find the beginning of a prompt again where an earlier request had it too"
    )
    target_devices: tuple[str, ...] = Field(
        default=("cpu:0",), description="devices of the target: cpu:CORE pins to a core, cuda:N a GPU"
    )
    draft_devices: tuple[str, ...] = Field(default=("cpu:1",), description="device of the draft process (ssd)")
    target_threads: int = Field(default=1, ge=1, description="threads of the target, as many as it has cores")
    draft_threads: int = Field(default=1, ge=1, description="threads of the draft process (ssd)")

    @model_validator(mode="after")
    def _fits(self) -> EngineSettings:
        if self.refresh > self.lookahead:
            raise ValueError(f"refresh = {self.refresh} is more than lookahead = {self.lookahead}; give 0..lookahead")
        if self.fallback_lookahead is not None and self.fallback_lookahead > self.lookahead:
            raise ValueError(
                f"fallback_lookahead = {self.fallback_lookahead} is more than lookahead = {self.lookahead}; give less"
            )
        return self
