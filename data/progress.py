"""Progress of a long command: a bar on a terminal, in a log a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_SECONDS = 30.0  # between lines where there is no terminal


class Meter:
    """Counts towards `total` of something; a context manager."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        console = Console(stderr=True)
        self.name, self.total, self.done, self.first = name, total, done, done
        self.started = self.last_line = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> Meter:
        if self.bar:
            self.bar.add_task(self.name, total=self.total, completed=min(self.done, self.total))
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()
        elif self.done > self.first:
            self._print()

    def add(self, number: int) -> None:
        """`number` more are done."""
        self.done += number
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=min(self.done, self.total))
        elif time.monotonic() - self.last_line >= LOG_SECONDS:
            self._print()

    def _print(self) -> None:
        """`answer tokens: 12000 of 300000 (4 %), 85.2 a second, 0:56:20 left`."""
        self.last_line = time.monotonic()
        speed = (self.done - self.first) / max(1e-9, self.last_line - self.started)
        left = int(max(0, self.total - self.done) / speed) if speed else 0
        clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        share = self.done / max(1, self.total)
        print(
            f"{self.name}: {self.done} of {self.total} ({share:.0%}), {speed:.1f} a second, {clock}",
            file=sys.stderr,
            flush=True,
        )
