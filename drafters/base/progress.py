"""Progress of a long command: on a terminal a bar with count, rate and time left, in a log a line now and then."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LOG_SECONDS = 20.0  # between lines where there is no terminal
REFRESHES_PER_SECOND = 2  # of the bar; each takes time from the work


class ProgressDisplay:
    """Shows on stderr that `done` of `total` are done; a context manager.

    In a log, the first and the last update print a line, the others one every `LOG_SECONDS`. `done` counts what an
    earlier run did too; rate and time left are those of this run.
    """

    def __init__(
        self,
        name: str,
        total: int,
        done: int = 0,
        *,
        console: Console | None = None,
        show_rate: bool = True,
        quiet: bool = False,
    ) -> None:
        self.name, self.total, self.done, self.show_rate, self.quiet = name, total, done, show_rate, quiet
        self._console = Console(stderr=True) if console is None else console
        self._bar: Progress | None = None
        self._note = ""
        self._given_seconds_left: float | None = None
        self._first_done, self._started = done, time.monotonic()
        self._logged_done, self._logged_at = done, -math.inf

    def __enter__(self) -> ProgressDisplay:
        if not self.quiet and self._console.is_terminal:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the bar; a log says how far the work came."""
        self.close()
        if not self.quiet and not self._console.is_terminal and self.done != self._logged_done:
            self._log()

    def advance(self, number: int = 1) -> None:
        """`number` more are done."""
        self.update(self.done + number)

    def update(self, done: int, note: str = "", seconds_left: float | None = None) -> None:
        """`done` are done in all. Without `seconds_left`, the rest is assumed to go on at the rate of this run."""
        self.done, self._note, self._given_seconds_left = done, note, seconds_left
        if self.quiet:
            return
        if self._console.is_terminal:
            self._draw()
        elif time.monotonic() - self._logged_at > LOG_SECONDS or done == self.total:
            self._log()

    def close(self) -> None:
        """Stop the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def _draw(self) -> None:
        shown = min(self.done, self.total)
        if self._bar is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            text = TextColumn("{task.fields[text]}", markup=False)
            self._bar = Progress(*columns, text, console=self._console, refresh_per_second=REFRESHES_PER_SECOND)
            self._bar.add_task(self.name, total=self.total, completed=shown, text=self._text())
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=shown, text=self._text())

    def _log(self) -> None:
        self._logged_done, self._logged_at = self.done, time.monotonic()
        line = f"{self.name} {self.done}/{self.total} {self._text()}".rstrip()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _text(self) -> str:
        """Rate, time left and note: `85.2/s 0:56:20 left loss 2.31`."""
        made, seconds = self.done - self._first_done, time.monotonic() - self._started
        left = self._given_seconds_left
        if left is None and made > 0:
            left = seconds * max(0, self.total - self.done) / made
        rate = per_second(made, seconds) if self.show_rate and made > 0 else ""
        return " ".join(filter(None, (rate, "" if left is None else f"{clock(left)} left", self._note)))


def per_second(number: int, seconds: float) -> str:
    """A rate in words: 170 in 2 seconds are `85.0/s`, 2 in 170 seconds are `85.0 s each`."""
    return f"{number / max(seconds, 1e-9):.1f}/s" if number >= seconds else f"{seconds / number:.1f} s each"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 3725 is 1:02:05."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
