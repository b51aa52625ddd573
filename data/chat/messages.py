"""Chat messages and tool definitions, normalised to one form from the layouts of OpenAI and ShareGPT.

The form is OpenAI's: `role`, `content`, and where they are there `reasoning_content`, `tool_calls`, `tool_call_id`,
`name` and `weight`. Arguments of tool calls are objects, not JSON in a string, because that is what chat templates
expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drafters.base.errors import UserError

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class DataError(UserError):
    """Input data that cannot be used. The message names the file, the line and the remedy."""


def to_message(turn: Any, where: str) -> Message:
    """Read one message, of OpenAI's layout (role, content) or ShareGPT's (from, value). Raises `DataError` that starts
    with `where`.
    """
    if not isinstance(turn, Mapping):
        raise DataError(
            f"{where} is a {type(turn).__name__}; it has to be an object with role and content (or from and value)"
        )
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        raise DataError(f"{where} has the role {name!r}; known roles: {', '.join(ROLES)}")
    role, content = ROLES[name], turn.get("content", turn.get("value"))
    calls = turn.get("tool_calls")
    if name == "function_call":
        calls, content = content, None
    message: Message = {"role": role}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning, f"{where}: its reasoning")
    if calls:
        message["tool_calls"] = [_to_call(call, where) for call in _from_json(calls, f"{where}: its tool calls")]
    may_be_empty = content is None and (calls or reasoning)
    message["content"] = "" if may_be_empty else _text(content, where)
    for key in ("tool_call_id", "name"):
        if turn.get(key) is not None:
            message[key] = _text(turn[key], f"{where}: its {key}")
    if turn.get("weight") is not None:
        message["weight"] = _to_weight(turn["weight"], where)
    return message


def to_tools(value: Any, where: str) -> tuple[Tool, ...]:
    """The tools of a row: a list of definitions, or JSON of one. A bare function is put into OpenAI's `{"type":
    "function"}`.
    """
    if not value:
        return ()
    return tuple(_to_tool(tool, where) for tool in _from_json(value, f"{where}: its tools"))


def plain(message: Mapping[str, Any]) -> bool:
    """Whether a message has no reasoning and no tool calls."""
    return not message.get("reasoning_content") and not message.get("tool_calls")


def stored(message: Message) -> Message:
    """The message as a Parquet column holds it: tool calls as JSON, since their arguments have no common schema."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": json.dumps(calls, ensure_ascii=False)} if isinstance(calls, list) else message


def _text(content: Any, where: str) -> str:
    if (
        isinstance(content, list)
        and content
        and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    ):
        content = "".join(part["text"] for part in content)  # OpenAI's content parts, all of them text
    if not isinstance(content, str):
        raise DataError(
            f"{where} has content of type {type(content).__name__}; it has to be a string: "
            "leave out images and other media"
        )
    if not _is_unicode(content):
        raise DataError(f"{where} holds half of a surrogate pair, which is no text; remove the \\ud800-\\udfff escape")
    return content


def _to_call(call: Any, where: str) -> dict[str, Any]:
    """One tool call; a bare `{"name", "arguments"}` will do."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has a tool call without a name; it needs function.name and function.arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{where} calls {function['name']} with arguments that are no JSON ({error})") from error
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


def _to_tool(tool: Any, where: str) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where}: a tool has no name; "
            "tools are {'type': 'function', 'function': {'name', 'description', 'parameters'}}"
        )
    return {"type": "function", "function": dict(function)}


def _to_weight(weight: Any, where: str) -> int:
    if weight not in (0, 1):
        raise DataError(f"{where} has the weight {weight!r}; 0 (not learnt from) and 1 are known")
    return int(weight)


def _from_json(value: Any, where: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where} are no JSON ({error})") from error
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, list):
        raise DataError(f"{where} are a {type(value).__name__}; they have to be a list")
    return items


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
