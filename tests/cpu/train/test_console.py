"""What a long command shows: a bar with the time left on a terminal, a line now and then without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as RichConsole

from train.monitor.console import Console


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    now = [1000.0]
    monkeypatch.setattr("drafters.base.progress.time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(speaks=True)
    for done in range(1, 101):
        at[0] += 2.0
        console.show("training", done, 100, f"loss {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training 1/100 loss 1" and lines[1] == "training 12/100 0:02:56 left loss 12"
    assert lines[-1] == "training 100/100 0:00:00 left loss 100" and len(lines) == 10


def test_a_better_estimate_of_the_time_left_is_shown(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(speaks=True)
    console.show("training", 1, 100, "x", seconds_left=3725.9)
    assert capsys.readouterr().err == "training 1/100 1:02:05 left x\n"


def test_a_new_task_is_shown_at_once(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(speaks=True)
    console.show("target features", 1, 9)
    console.show("target features", 2, 9)
    console.show("training", 5, 9)
    assert capsys.readouterr().err.splitlines() == ["target features 1/9", "training 5/9"]


def test_a_terminal_gets_a_bar_with_the_time_left_and_lines_above_it() -> None:
    console, screen = Console(speaks=True), io.StringIO()
    console.rich = RichConsole(file=screen, force_terminal=True, width=120, color_system=None)
    console.show("training", 1, 4, "loss 9.0", seconds_left=90.0)
    console.say("held-out 1: tau 1.5")
    console.show("training", 2, 4, "loss 8.0", seconds_left=60.0)
    console.close()
    shown = screen.getvalue()
    assert "2/4 0:01:00 left loss 8.0" in shown and "━" in shown and "held-out 1: tau 1.5" in shown


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(speaks=False)
    console.say("x")
    console.show("training", 1, 1)
    assert capsys.readouterr().err == ""
