"""Shared by the commands: options with settings between them, Ctrl-C between two steps, messages on stderr
(torch-free).
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from drafters.base.errors import CommandParser, UserError, unknown_name
from drafters.base.serving import ServingSettings
from drafters.base.settings import Settings
from infer.config import EngineSettings

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


class Parser(CommandParser):
    """Options of the commands, with `key=value` settings between them."""

    def add_recipe(self) -> None:
        """Add `--recipe` and the `key=value` settings, from which the engine is built."""
        self.add_argument(
            "--recipe",
            required=True,
            metavar="FILE",
            help="YAML file of settings, such as recipes/smollm2-135m/serve.yaml",
        )
        self.epilog = f"{settings_help()}\n\n{self.epilog}"
        self.add_argument(
            "overrides", nargs="*", metavar="key=value", help="a setting in place of the recipe's, such as lookahead=4"
        )

    def add_tracing(self) -> None:
        """Add `--trace` and `--profile`, which show where the time of a round goes."""
        self.add_argument(
            "--trace",
            metavar="FILE",
            help="write each round of both processes as a Chrome trace, for ui.perfetto.dev",
        )
        self.add_argument("--profile", metavar="DIR", help="profile the target's process with torch.profiler")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`, with options and settings in any order. Raises `UserError` for an unknown option."""
        options, left = self.parse_known_intermixed_args(argv)
        if left:
            raise unknown_name(
                "option",
                left[0].partition("=")[0],
                [name for name in self._option_string_actions if name.startswith("--")],
            )
        return options


class Interrupt:
    """Truthy once Ctrl-C was pressed or SIGTERM came."""

    def __init__(self) -> None:
        self.pressed = False

    def __bool__(self) -> bool:
        return self.pressed


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C or SIGTERM only sets the flag, so that it interrupts no step of the engine; the second
    raises `KeyboardInterrupt`.
    """
    interrupt = Interrupt()

    def on_signal(signum: int, frame: object) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def loading(text: str) -> Iterator[None]:
    """Show a spinner with `text` while something loads; `transformers` shows no bars of its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with stderr.status(text):
        yield


def note(line: str, style: str = "dim") -> None:
    """Print a line on stderr, beside the command's output."""
    stderr.print(line, style=style)


def make_directory(option: str, name: str) -> Path:
    """The directory that `option` names, made where it is missing. Raises `UserError` where that cannot be."""
    directory = Path(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option} {name}: cannot make that directory ({error.strerror}): give one that can be written"
        ) from error
    return directory


def settings_help() -> str:
    """The engine's settings with their defaults, for `--help`."""
    lines = ["settings (in the recipe, or as key=value on the command line; the last ones in a `serving:` block too):"]
    for name, field in sorted(EngineSettings.model_fields.items(), key=lambda f: f[0] in ServingSettings.model_fields):
        value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        default = "" if field.is_required() or value is None or isinstance(value, Settings) else f" [{value}]"
        lines.append(f"  {name}{default}".ljust(28) + (field.description or ""))
    return "\n".join(line.rstrip() for line in lines)
