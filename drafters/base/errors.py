"""User errors: the exception `UserError`, and `run_command`, which turns it into one line and an exit status.

Nothing here imports torch, so `--help` and a mistyped key answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NoReturn

from drafters.base.logs import DEFAULT, LEVELS, OPTION, set_up_logging, take_log_level

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A mistake the user can repair. The message names the field or file, the value, and the remedy, in one line."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    `unknown_name("setting", "lookahed", ["lookahead", "budget"])` says:
    unknown setting 'lookahed': did you mean 'lookahead'?
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}: {hint}")


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are a `UserError`: one line, like every other mistake. Options are not abbreviated."""

    def __init__(self, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self.add_argument(OPTION, choices=LEVELS, default=DEFAULT, help=f"what to log to stderr (default: {DEFAULT})")

    def error(self, message: str) -> NoReturn:
        """Called by argparse for what it cannot read."""
        raise UserError(f"{message} ({self.prog} --help explains the options)")


def run_command(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> int:
    """Run a command's `main(argv)` and turn a `UserError` into one line on stderr.

    Returns the exit status: 0, 2 for a user's error, 130 after Ctrl-C. `--debug` anywhere in `argv` lets the
    traceback through, `--log-level` sets up logging; both are taken out before `main` sees the arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    level, arguments = take_log_level([argument for argument in arguments if argument != "--debug"])
    try:
        if level not in LEVELS:
            raise UserError(f"{OPTION} {level}: give {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
        set_up_logging(level)
        return main(arguments) or 0
    except UserError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
