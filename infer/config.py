"""Serving settings: one frozen record, the same names in recipes, on the command line and in `results.json`
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field

from drafters.base.serving import ServingSettings
from drafters.base.settings import Alias
from drafters.targets.template import TemplateOptions


class Mode(StrEnum):
    """How tokens are made: one by one, with synchronous drafting, or with drafting during verification."""

    AR = "ar"
    SD = "sd"
    SSD = "ssd"


BASELINE = "transformers"  # the label of a run of transformers' own generate, beside those of the modes


class EngineSettings(ServingSettings):
    """What an engine is built from. Settings of speculation have no effect in modes that do not use them.

    A recipe gives those of `ServingSettings` in a `serving:` block or, as short forms, at top level.
    """

    aliases: ClassVar[Mapping[str, Alias]] = {
        f"serving.{name}": Alias(name, deprecated=False) for name in ServingSettings.model_fields
    }

    target: str = Field(description="directory, hub id, .gguf file or builtin:smollm2-135m")
    drafter: str | None = Field(default=None, description="drafter directory (not needed for mode ar)")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="bfloat16 or float32")
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
