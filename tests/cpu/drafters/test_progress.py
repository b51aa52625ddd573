"""Progress display: a bar with rate and time left on a terminal, a line now and then in a log, nothing when quiet."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from drafters.base.progress import ProgressDisplay, clock, per_second


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test sets."""
    now = [1000.0]
    monkeypatch.setattr("drafters.base.progress.time.monotonic", lambda: now[0])
    return now


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_a_line_now_and_then_and_the_last_one(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("prompts", 100) as display:
        for _ in range(100):
            at[0] += 4.0
            display.advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["prompts 1/100 4.0 s each 0:06:36 left", "prompts 7/100 4.0 s each 0:06:12 left"]
    assert lines[-1] == "prompts 100/100 4.0 s each 0:00:00 left" and len(lines) == 18


def test_rate_and_time_left_are_those_of_this_run(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay("answer tokens", 1000, done=400)
    at[0] += 2.0
    display.advance(100)
    assert capsys.readouterr().err == "answer tokens 500/1000 50.0/s 0:00:10 left\n"


def test_a_log_says_how_far_an_interrupted_run_came(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), ProgressDisplay("prompts", 9) as display:
        for _ in range(3):
            at[0] += 1.0
            display.advance()
        raise KeyboardInterrupt
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/9", "3/9"]


def test_a_log_gets_nothing_for_nothing_done(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("prompts", 9, done=4):
        pass
    assert capsys.readouterr().err == ""


def test_more_than_planned_leaves_no_negative_time(at: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay("answer tokens", 10)
    at[0] += 1.0
    display.advance(12)
    assert capsys.readouterr().err == "answer tokens 12/10 12.0/s 0:00:00 left\n"


def test_a_terminal_gets_a_bar_from_the_start(at: list[float]) -> None:
    console = terminal()
    with ProgressDisplay("prompts [cpu:0]", 4, console=console) as display:
        assert "prompts [cpu:0]" in shown(console) and "0/4" in shown(console)
        at[0] += 2.0
        display.update(1, "loss [b]9")
    assert "━" in shown(console) and "1/4 2.0 s each 0:00:06 left loss [b]9" in shown(console)


def test_a_better_estimate_of_the_time_left_is_shown_without_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay("training", 9, show_rate=False)
    display.update(2, "x", seconds_left=3725.9)
    assert capsys.readouterr().err == "training 2/9 1:02:05 left x\n"


@pytest.mark.parametrize("console", [None, terminal()])
def test_quiet_shows_nothing(console: Console | None, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("prompts", 2, console=console, quiet=True) as display:
        display.advance()
    assert capsys.readouterr().err == "" and (console is None or shown(console) == "")


def test_clock_and_rate_in_words() -> None:
    assert [clock(s) for s in (0.4, 61, 36000)] == ["0:00:00", "0:01:01", "10:00:00"]
    assert [per_second(170, 2.0), per_second(2, 170.0), per_second(3, 0.0)] == [
        "85.0/s",
        "85.0 s each",
        "3000000000.0/s",
    ]
