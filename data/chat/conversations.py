"""Reads conversations from files and hub data sets: OpenAI `messages`, ShareGPT `conversations`, `prompt` rows.

JSON files are parsed here, so that every error names its line and rows need not share one schema; Parquet files and
hub data sets are streamed through the `datasets` library, which leaves nothing in a cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from data.chat.messages import DataError, Message, Tool, to_message, to_tools
from data.manifest import MANIFEST_NAME

SUFFIXES = (".jsonl", ".json", ".parquet")
LAYOUTS = "'messages' (role, content), 'conversations' (from, value) or 'prompt'"
HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>\w+))?")


class Conversation(NamedTuple):
    """One chat. `messages` have the keys `role` (system, user, assistant, tool) and `content`, and those of
    `data.chat.messages`.

    `truncated` says that the last answer was cut by a length limit, so it has no end of turn. `source` is `file:line`
    (for Parquet and hub data the number of the row, from 1). `tools` are what the assistant could call, `temperature`
    what the answers were sampled at, where the row says so.
    """

    id: str
    messages: tuple[Message, ...]
    truncated: bool
    source: str
    tools: tuple[Tool, ...] = ()
    temperature: float | None = None


def read_conversations(
    spec: str | Path, limit: int | None = None, rejected: list[str] | None = None
) -> list[Conversation]:
    """Read at most `limit` conversations from a file, from a directory of files, or from the hub.

    `spec` is a `.jsonl`, `.json` or `.parquet` file, a directory that holds such files (read in the order of their
    names), or a hub data set, `owner/name` or `owner/name:split` (split `train` unless given). Raises `DataError`
    where the source is missing or empty, or a row is in no known layout; with a list `rejected`, such rows are left
    out, and the list gets a line about each.
    """
    conversations = []
    for row, source in islice(_rows(spec), limit):
        try:
            conversations.append(_to_conversation(row, source))
        except DataError as error:
            if rejected is None:
                raise
            rejected.append(str(error))
    if not conversations and not rejected and limit != 0:
        raise DataError(f"{spec} holds no rows: it needs rows with {LAYOUTS}")
    return conversations


def _rows(spec: str | Path) -> Iterator[tuple[Any, str]]:
    path = Path(spec)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_data(file))
        if not files:
            raise DataError(
                f"{path} holds no {', '.join(SUFFIXES)} file: give a directory with data files, or one file"
            )
        for file in files:
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    else:
        yield from _hub_rows(str(spec))


def _is_data(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.name != MANIFEST_NAME and not path.name.startswith(".")


def _file_rows(path: Path) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".json" and _starts_array(path):
        return _array_rows(path)
    if path.suffix in SUFFIXES:
        return _line_rows(path)
    raise DataError(f"{path} has an unknown file type {path.suffix!r}: use one of {', '.join(SUFFIXES)}")


def _line_rows(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line), f"{path}:{number}"
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not valid JSON ({error}); write one JSON object on each line"
                ) from error


def _starts_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """The elements of a JSON array, each with the line it starts on."""
    text = _read_text(path)
    decode = json.JSONDecoder().raw_decode
    blank = re.compile(r"\s*")

    def skip(index: int) -> int:
        match = blank.match(text, index)
        return match.end() if match else index

    line, counted = 1, 0
    position = skip(text.index("[") + 1)
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, end = decode(text, position)
        except ValueError as error:
            at = getattr(error, "lineno", line)
            raise DataError(
                f"{path}:{at}: not valid JSON ({error}); the file has to be one array of objects"
            ) from error
        yield row, f"{path}:{line}"
        position = skip(end)
        if text.startswith(",", position):
            position = skip(position + 1)
        elif not text.startswith("]", position):
            at = 1 + text.count("\n", 0, position)
            raise DataError(
                f"{path}:{at}: not valid JSON (expected ',' or ']'); the file has to be one array of objects"
            )


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from error


def _parquet_rows(path: Path) -> Iterator[tuple[Any, str]]:
    from pyarrow import ArrowException

    try:
        with TemporaryDirectory() as cache:
            yield from _stream("parquet", "train", str(path), data_files=str(path), cache_dir=cache)
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file ({error}): write it again or restore it") from error


def _hub_rows(spec: str) -> Iterator[tuple[Any, str]]:
    match = HUB_NAME.fullmatch(spec)
    if match is None or spec.endswith(SUFFIXES) or Path(spec).parent.is_dir():
        raise DataError(
            f"no such file or directory: {spec} "
            f"(a {', '.join(SUFFIXES)} file, a directory of them, or a hub name owner/name will do)"
        )
    from datasets.exceptions import DatasetsError

    try:
        yield from _stream(match["name"], match["split"] or "train", spec)
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"cannot read {spec} from the hub ({error}): check name, split (owner/name:split) and network"
        ) from error


def _stream(builder: str, split: str, name: str, **options: str) -> Iterator[tuple[Any, str]]:
    from datasets import load_dataset  # takes seconds to import, and JSON files do without it

    rows = load_dataset(builder, split=split, streaming=True, **options)  # type: ignore[arg-type]
    for number, row in enumerate(rows, start=1):
        yield row, f"{name}:{number}"


def _to_conversation(row: Any, source: str) -> Conversation:
    if not isinstance(row, Mapping):
        raise DataError(f"{source}: the row is a {type(row).__name__}; it has to be an object with {LAYOUTS}")
    turns = row.get("messages") or row.get("conversations")
    if turns is None and row.get("prompt") is not None:
        turns = [{"role": "user", "content": row["prompt"]}]
    if not turns:
        keys = ", ".join(map(repr, row)) or "no keys"
        raise DataError(f"{source}: the row is in no known layout (it has {keys}); it needs a non-empty {LAYOUTS}")
    if not isinstance(turns, list):
        raise DataError(f"{source}: the messages are a {type(turns).__name__}; they have to be a list")
    messages = tuple(to_message(turn, f"{source}: message {number}") for number, turn in enumerate(turns, start=1))
    identity = row.get("id")
    return Conversation(
        id=source if identity is None else str(identity),
        messages=messages,
        truncated=row.get("finish_reason") == "length",
        source=source,
        tools=to_tools(row.get("tools"), source),
        temperature=_to_number(row.get("temperature"), source),
    )


def _to_number(value: Any, source: str) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise DataError(f"{source}: its temperature is {value!r}; it has to be a number")
