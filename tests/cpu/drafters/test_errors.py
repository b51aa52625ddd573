"""A user's mistake becomes one line and an exit status; a programmer's keeps its traceback."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from drafters.base.errors import EXIT_USER_ERROR, CommandParser, UserError, run_command, unknown_name


def test_unknown_name_suggests_the_nearest() -> None:
    error = unknown_name("setting", "lookahed", ["budget", "lookahead", "policy"])
    assert str(error) == "unknown setting 'lookahed': did you mean 'lookahead'?"


def test_unknown_name_lists_all_where_none_is_near() -> None:
    error = unknown_name("policy", "xyz", ["uniform", "geometric"])
    assert str(error) == "unknown policy 'xyz': known: geometric, uniform"


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_exit_status_of_a_command_that_ends(returned: int | None, status: int) -> None:
    assert run_command(lambda argv: returned, []) == status


def test_a_users_mistake_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise UserError("prompt is empty:\n    give --prompt some text")

    assert run_command(main, []) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: prompt is empty: give --prompt some text\n"
    assert captured.out == ""


def test_debug_shows_the_traceback_and_is_not_passed_on() -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        run_command(main, ["--debug", "lookahead=5"])
    assert seen == [["lookahead=5"]]


def test_the_log_level_is_set_and_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[list[str], bool, bool]] = []

    def main(argv: list[str]) -> int:
        own, library = logging.getLogger("infer.engine"), logging.getLogger("urllib3")
        seen.append((argv, own.isEnabledFor(logging.INFO), library.isEnabledFor(logging.INFO)))
        return 0

    for arguments in (["--log-level", "info", "a=1"], ["a=1", "--log-level=debug"], ["a=1"]):
        assert run_command(main, arguments) == 0
    assert seen == [(["a=1"], True, False), (["a=1"], True, False), (["a=1"], False, False)]
    assert run_command(main, ["--log-level", "loud"]) == EXIT_USER_ERROR
    assert "--log-level loud: give debug, info, warning or error" in capsys.readouterr().err


def test_a_command_logs_to_stderr_with_the_logger_where_details_are_asked_for() -> None:
    script = (
        "import logging, sys; from drafters.base.errors import run_command\n"
        "log = logging.getLogger('infer.x')\n"
        "def main(argv):\n    log.info('a detail'); log.warning('no')\n"
        "sys.exit(run_command(main))"
    )

    def log_of(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        ).stderr

    assert log_of() == "no\n"
    assert "INFO infer.x: a detail" in log_of("--log-level", "info")
    assert log_of("--log-level", "error") == ""


def test_other_exceptions_are_not_swallowed() -> None:
    def main(argv: list[str]) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(main, [])


def test_interrupt_ends_with_the_shells_status(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    assert run_command(main, []) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistyped_option_is_one_line_like_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        parser = CommandParser("python -m some.command", "What it does.", "  python -m some.command --size 3")
        parser.add_argument("--size", type=int)
        return parser.parse_args(argv).size

    assert run_command(main, ["--size", "3"]) == 3
    for argv, cause in (
        (["--size", "big"], "invalid int value: 'big'"),
        (["--siz", "3"], "unrecognized arguments: --siz 3"),
    ):
        assert run_command(main, argv) == EXIT_USER_ERROR
        line = capsys.readouterr().err
        assert (
            line.startswith("error: ")
            and cause in line
            and "python -m some.command --help" in line
            and line.count("\n") == 1
        )
