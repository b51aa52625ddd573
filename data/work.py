"""Work files of a corpus that is being written: one JSON line for each finished piece, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a work file, without touching it: another process may still be writing. None where it is missing."""
    content = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]


def mend(file: Path) -> list[dict[str, Any]]:
    """The complete lines; one that a kill cut short is taken out of the file, and will be written again."""
    if file.is_file():
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            file.write_bytes(whole)
    return read_lines(file)
