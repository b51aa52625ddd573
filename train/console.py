"""What a long command shows: lines, and progress with the time left. On a terminal a bar, in a log a line now and then."""

from __future__ import annotations

import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_SECONDS = 20.0  # between progress lines where there is no terminal


class Console:
    """Prints for one process; the others are silent."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.rich = RichConsole(stderr=True)
        self.bar: Progress | None = None
        self.name, self.started, self.first_done, self.last_line = "", 0.0, 0, 0.0

    def say(self, line: str) -> None:
        """Print one line."""
        if self.speaks:
            self.rich.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, name: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` of the task `name` are done."""
        if not self.speaks:
            return
        if name != self.name:
            self.close()
            self.name, self.started, self.first_done, self.last_line = name, time.monotonic(), done, 0.0
        if self.rich.is_terminal:
            self._draw(done, total, note)
        elif time.monotonic() - self.last_line > LOG_SECONDS or done == total:
            self.last_line = time.monotonic()
            print(f"{name} {done}/{total} {self._left(done, total)} {note}".rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the current bar."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.name = None, ""

    def _draw(self, done: int, total: int, note: str) -> None:
        if self.bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self.bar = Progress(*columns, console=self.rich)
            self.bar.add_task(self.name, total=total, completed=done, note=note)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, note=note)

    def _left(self, done: int, total: int) -> str:
        made, seconds = done - self.first_done, time.monotonic() - self.started
        if made <= 0:
            return ""
        left = int(seconds * (total - done) / made)
        return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
