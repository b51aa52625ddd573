"""Terminal output of a run's first process: lines, and a progress display of the task at hand."""

from __future__ import annotations

from rich.console import Console as RichConsole

from drafters.base.progress import ProgressDisplay


class Console:
    """Prints for one process; the others are silent."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.rich = RichConsole(stderr=True)
        self.progress: ProgressDisplay | None = None

    def say(self, line: str) -> None:
        """Print one line."""
        if self.speaks:
            self.rich.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, name: str, done: int, total: int, note: str = "", seconds_left: float | None = None) -> None:
        """Show that `done` of `total` of the task `name` are done (see `ProgressDisplay.update`)."""
        if not self.speaks:
            return
        if self.progress is None or (name, total) != (self.progress.name, self.progress.total):
            self.close()
            self.progress = ProgressDisplay(name, total, done, console=self.rich, show_rate=False)
        self.progress.update(done, note, seconds_left)

    def close(self) -> None:
        """Leave the current task."""
        if self.progress is not None:
            self.progress.close()
        self.progress = None
