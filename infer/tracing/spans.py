"""Spans of time of the target and of the draft processes, written as one Chrome trace (JSON trace events).

`span("glue", rounds)` records nothing, at the cost of a function call, unless the process records. The target's
process records inside `recording(path)`; a draft process records after `record_part`, into a file of its own beside
`path`, which it appends to after every message. The target merges those files into the trace when its recording ends,
so neither Ctrl-C nor a killed draft process loses what was recorded. Times are `time.perf_counter`, which all
processes of a machine share on Linux (CLOCK_MONOTONIC).

https://ui.perfetto.dev and chrome://tracing open the file; `infer.tracing.plot` draws a part of it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafters.base.errors import UserError
from drafters.base.files import atomic_write_text

Rounds = Mapping[str, int]  # request -> its round: the number of committed tokens the verification starts from
TARGET, DRAFTER = "target", "draft process"


class Span:
    """A context manager; recorded when it ends. This one records nothing."""

    __slots__ = ()

    def note(self, **arguments: Any) -> None:
        """Add arguments that are known only inside the span."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Recorded(Span):
    __slots__ = ("arguments", "name", "spans", "started")

    def __init__(self, spans: list[tuple[Any, ...]], name: str, arguments: dict[str, Any]) -> None:
        self.spans, self.name, self.arguments = spans, name, arguments
        self.started = 0

    def note(self, **arguments: Any) -> None:
        self.arguments |= arguments

    def __enter__(self) -> Span:
        self.started = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        ended, thread = time.perf_counter_ns(), threading.current_thread()
        self.spans.append(
            (self.name, self.started, ended - self.started, thread.native_id, thread.name, self.arguments)
        )


class _Recorder:
    """The spans of this process. `path` is the trace; in a draft process `part` is the file that it appends to."""

    def __init__(self, path: Path, part: Path | None = None) -> None:
        self.path, self.part = path, part
        self.spans: list[tuple[Any, ...]] = []


_OFF = Span()
_recorder: _Recorder | None = None


def span(name: str, rounds: Callable[[], Rounds] | None = None) -> Span:
    """A span of that name, for a `with`. `rounds` gives the rounds it works for; it is called only when recording."""
    if _recorder is None:
        return _OFF
    return _Recorded(_recorder.spans, name, {"rounds": dict(rounds())} if rounds else {})


def trace_path() -> str | None:
    """The trace that this process records, None where it records nothing."""
    return str(_recorder.path.resolve()) if _recorder else None


@contextmanager
def recording(path: str | None) -> Iterator[None]:
    """Record the target's process inside, and write the trace at the end, whatever ends it. None records nothing.

    Raises `UserError` where the file cannot be written, before anything runs.
    """
    global _recorder
    if path is None:
        yield
        return
    recorder = _Recorder(Path(path))
    _make(recorder.path)
    for left_over in _parts(recorder.path):
        left_over.unlink()
    started, _recorder = time.perf_counter_ns(), recorder
    try:
        yield
    finally:
        _recorder = None
        _write(recorder, started)


def record_part(path: str) -> None:
    """Record this draft process as a part of the trace at `path`."""
    global _recorder
    trace = Path(path)
    _recorder = _Recorder(trace, trace.with_name(f"{trace.name}.{os.getpid()}.part"))


def flush() -> None:
    """Append what a draft process has recorded to its part of the trace."""
    if _recorder is None or _recorder.part is None:
        return
    spans, _recorder.spans[:] = list(_recorder.spans), []
    with _recorder.part.open("a", encoding="utf-8") as part:
        part.writelines(json.dumps(found) + "\n" for found in spans)


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"traceEvents": []}\n', encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trace {path}: cannot write that file ({error.strerror})") from error


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.*.part"))


def _write(recorder: _Recorder, started: int) -> None:
    """Merge the spans of all processes; times in the trace are microseconds since the recording started."""
    events = _events(recorder.spans, os.getpid(), TARGET, started)
    for part in _parts(recorder.path):
        lines = part.read_text(encoding="utf-8").splitlines(keepends=True)
        spans = [tuple(json.loads(line)) for line in lines if line.endswith("\n")]  # a kill may cut the last one
        events += _events(spans, int(part.suffixes[-2][1:]), DRAFTER, started)
    atomic_write_text(recorder.path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    for part in _parts(recorder.path):
        part.unlink()


def _events(spans: list[tuple[Any, ...]], pid: int, process: str, started: int) -> list[dict[str, Any]]:
    """Complete events ("X") of one process, after the metadata ("M") that names the process and its threads."""

    def name(kind: str, value: str, tid: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": value}}

    threads = {tid: "main" if thread == "MainThread" else thread for _, _, _, tid, thread, _ in spans}
    found = [
        name("process_name", process, pid),
        *(name("thread_name", thread, tid) for tid, thread in threads.items()),
    ]
    for label, start, nanoseconds, tid, _, arguments in spans:
        times = {"ts": (start - started) / 1000, "dur": nanoseconds / 1000}
        found.append({"ph": "X", "name": label, "cat": process, "pid": pid, "tid": tid, **times, "args": arguments})
    return found
