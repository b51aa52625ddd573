"""What a long command shows: lines, and progress with the time left. On a terminal a bar, in a log a line now and
then.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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

    def show(self, name: str, done: int, total: int, note: str = "", seconds_left: float | None = None) -> None:
        """Show that `done` of `total` of the task `name` are done. Without `seconds_left`, the rest is taken to go on
        as fast.
        """
        if not self.speaks:
            return
        if name != self.name:
            self.close()
            self.name, self.started, self.first_done, self.last_line = name, time.monotonic(), done, 0.0
        left = self._left(done, total) if seconds_left is None else seconds_left
        words = "" if left is None else f"{clock(left)} left"
        if self.rich.is_terminal:
            self._draw(done, total, words, note)
        elif time.monotonic() - self.last_line > LOG_SECONDS or done == total:
            self.last_line = time.monotonic()
            print(" ".join(filter(None, (f"{name} {done}/{total}", words, note))), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the current bar."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.name = None, ""

    def _draw(self, done: int, total: int, left: str, note: str) -> None:
        if self.bar is None:
            columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
            columns += [TextColumn("{task.fields[left]}"), TextColumn("{task.fields[note]}")]
            self.bar = Progress(
                *columns, console=self.rich, refresh_per_second=2
            )  # a refresh takes time from the work
            self.bar.add_task(self.name, total=total, completed=done, left=left, note=note)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, left=left, note=note)

    def _left(self, done: int, total: int) -> float | None:
        made, seconds = done - self.first_done, time.monotonic() - self.started
        return seconds * (total - done) / made if made > 0 else None


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 3725 is 1:02:05."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
