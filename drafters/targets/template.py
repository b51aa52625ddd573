"""Options of the target's chat template, which training data, drafter card and serving have to share (torch-free)."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from drafters.base.errors import UserError
from drafters.base.settings import Settings


class TemplateOptions(Settings):
    """Arguments of the chat template beside the messages. None is not passed, so the template's own default holds."""

    enable_thinking: bool | None = Field(default=None, description="for templates that know it, such as Qwen3's")
    tools: str | None = Field(
        default=None, description="JSON file of tool definitions, for chats that name none of their own"
    )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the template, without the tools."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def read_tools(self) -> tuple[dict[str, Any], ...]:
        """The definitions in the file `tools`; none without it. Raises `UserError` for anything but a JSON list of
        objects.
        """
        return () if self.tools is None else _read_tools(self.tools)

    def recorded(self) -> dict[str, Any]:
        """The options that were given, for manifests and cards; a file of tools is recorded by its hash."""
        kept = self.arguments()
        if self.tools is not None:
            kept["tools"] = hashlib.sha256(json.dumps(self.read_tools(), sort_keys=True).encode()).hexdigest()[:16]
        return kept


@lru_cache
def _read_tools(path: str) -> tuple[dict[str, Any], ...]:
    file = Path(path)
    if not file.is_file():
        raise UserError(f"template.tools = {path}: no such file; give a JSON file with a list of tool definitions")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"template.tools = {path} is not valid JSON ({error})") from error
    if not isinstance(content, list) or not all(isinstance(tool, dict) and "function" in tool for tool in content):
        raise UserError(
            f"template.tools = {path} has to hold a list of tool definitions, objects with type and function"
        )
    return tuple(content)


def differences(made_with: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """One phrase for each template option that differs: `enable_thinking was False, is not given now`."""

    def said(options: dict[str, Any], name: str) -> str:
        return repr(options[name]) if name in options else "not given"

    names = sorted(made_with.keys() | asked.keys())
    return [
        f"{name} was {said(made_with, name)}, is {said(asked, name)} now"
        for name in names
        if made_with.get(name) != asked.get(name)
    ]
