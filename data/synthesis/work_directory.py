"""Work directory of a corpus run: its settings, one JSON line per finished piece, and which shards are complete.

A stopped run is resumed from it, other settings are refused, and a merge sees which shards are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from drafters.base.errors import UserError
from drafters.base.files import atomic_write_text
from drafters.base.settings import Settings, build_settings

SETTINGS_FILE = "settings.json"


class RunSettings(Settings):
    """What the rows of a run depend on. Batch size, device and the number of tokens may change between runs."""

    target: str
    target_weight_hash: str
    tokenizer_hash: str
    template_hash: str
    template_options: dict[str, Any] = Field(default_factory=dict)
    model: str | None = Field(
        default=None, description="name at the server that answers; None where this process does"
    )
    seed: int
    temperatures: tuple[float, ...]
    prompt_temperature: float
    max_new_tokens: int
    max_prompt_tokens: int
    dtype: str
    prompts: str = Field(description="hash of the prompts that were given; empty where the target writes them")
    prompt_source: str
    shards: int


def store_settings(work: Path, settings: RunSettings, say: Callable[[str], None]) -> None:
    """Store `settings` beside the work files. Raises `UserError`, naming the difference, if the run has others."""
    before = read_settings(work)
    if before is not None:
        for name in RunSettings.model_fields:
            was, now = getattr(before, name), getattr(settings, name)
            if was != now:
                raise UserError(
                    f"{work} was begun with {name} = {was!r}, this command has {now!r}: "
                    "give the same, or another --out"
                )
        return
    if any(work.glob("*.jsonl")):
        say(f"{work} holds lines of a run that kept no settings: going on as if they were the same")
    work.mkdir(parents=True, exist_ok=True)
    atomic_write_text(work / SETTINGS_FILE, json.dumps(settings.model_dump(mode="json"), indent=2) + "\n")


def read_settings(work: Path) -> RunSettings | None:
    """The stored settings of a run; None where there are none."""
    file = work / SETTINGS_FILE
    if not file.is_file():
        return None
    try:
        return build_settings(RunSettings, json.loads(file.read_text(encoding="utf-8")), where=str(file))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): restore it, or start anew with another --out") from error


def mark_complete(work: Path, shard: int, complete: bool) -> None:
    """Mark a shard as complete, or as at work again."""
    file = work / f"complete-{shard}"
    if complete:
        file.touch()
    else:
        file.unlink(missing_ok=True)


def incomplete_shards(work: Path, shards: int) -> list[int]:
    """The shards that are not marked as complete."""
    return [shard for shard in range(shards) if not (work / f"complete-{shard}").is_file()]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a work file, none if it is missing. Does not change it: another process may be writing."""
    content = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]


def read_and_repair(file: Path) -> list[dict[str, Any]]:
    """The complete lines; a last line that a kill cut short is removed from the file, to be written again."""
    if file.is_file():
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            file.write_bytes(whole)
    return read_lines(file)
