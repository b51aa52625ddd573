"""Logging set-up: `--log-level` of every command, and the level of the processes that a command starts.

The level holds for the project's own loggers. Libraries stay at `warning`: at `debug` some log every file they open.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

LEVELS = ("debug", "info", "warning", "error")
DEFAULT = "warning"
OPTION = "--log-level"
OWN = ("data", "drafters", "infer", "train", "__main__")  # the command itself runs as `__main__`


def set_up_logging(level: str = DEFAULT) -> None:
    """Log to stderr from `level` on: bare messages by default, with time and logger at `info` and `debug`.

    Handlers that the root logger has already are kept as they are.
    """
    assert level in LEVELS, level
    detailed = level in ("debug", "info")
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s" if detailed else "%(message)s"
    logging.basicConfig(level=logging.WARNING, format=form)
    for name in OWN:
        logging.getLogger(name).setLevel(level.upper())


def log_level() -> str:
    """The level that `set_up_logging` was called with; a process that this one starts is given it."""
    return logging.getLevelName(logging.getLogger("infer").getEffectiveLevel()).lower()


def take_log_level(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The value of the last `--log-level` in the arguments of a command, and the arguments without it.

    `take_log_level(["--port", "1", "--log-level", "info"])` is `("info", ["--port", "1"])`.
    """
    level, rest, left = DEFAULT, [], list(arguments)
    while left:
        argument = left.pop(0)
        if argument == OPTION and left:
            level = left.pop(0)
        elif argument.startswith(f"{OPTION}="):
            level = argument.partition("=")[2]
        else:
            rest.append(argument)
    return level, rest
