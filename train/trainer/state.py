"""Training state on disk, to resume from: one file each, written atomically; old ones are removed.

It holds full tensors by parameter name, whatever the parallel strategy, so a run goes on with another number of
processes too.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.base.errors import UserError
from drafters.base.files import atomic_write, remove_temporary
from train.objective.visits import DepthCounts

SUFFIX = ".safetensors"
PATTERN = f"step-*{SUFFIX}"
MOMENTS = ("exp_avg", "exp_avg_sq")
SAME_KEYPRESS_SECONDS = 2.0  # a launcher passes a Ctrl-C on to processes that the terminal has told already


class Progress(NamedTuple):
    """Where a run stands: optimizer steps done, the best predicted speed on held-out data so far, and how many
    measurements ago.

    Data order, anchors, random numbers and learning rate are functions of (seed, step), so the step is all they need.
    `tally` is what the drafter measured of itself (`visits.py`); empty before the first step.
    """

    step: int = 0
    best: float = 0.0
    tally: DepthCounts = ()
    measured_since: int = 0


class TrainingState(NamedTuple):
    """Trained parameters and AdamW's moments by parameter name, fp32 on the CPU, and how many updates made them."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]  # by the names in MOMENTS
    updates: int


class Saved(NamedTuple):
    """What a file holds."""

    state: TrainingState
    progress: Progress


def save_state(directory: Path, state: TrainingState, progress: Progress, settings_key: str, keep: int) -> Path:
    """Write `directory/step-N.safetensors` and remove all but the newest `keep`."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_temporary(directory)
    tensors = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
    for moment, by_name in state.moments.items():
        tensors |= {f"{moment}.{name}": tensor for name, tensor in by_name.items()}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"progress": json.dumps(progress._asdict()), "settings": settings_key, "updates": str(state.updates)}
    final = directory / f"step-{progress.step:07d}{SUFFIX}"
    atomic_write(final, lambda temporary: save_file(plain, temporary, metadata))
    for old in states(directory)[:-keep]:
        old.unlink()
    return final


def states(directory: Path) -> list[Path]:
    """The state files, oldest first."""
    return sorted(directory.glob(PATTERN))


def newest_state(directory: Path, settings_key: str, say: Callable[[str], None]) -> Saved | None:
    """The newest state that can be read, or None where there is none. A damaged one is set aside and said.

    Raises `UserError` where the state belongs to another drafter or data set.
    """
    for file in reversed(states(directory)):
        try:
            saved, found_key = read_state(file)
        except (SafetensorError, OSError) as error:
            aside = file.rename(file.with_name(f"{file.name}.damaged"))
            say(f"{file} is damaged ({error}), now {aside.name}; going on from the state before it")
            continue
        if found_key != settings_key:
            raise UserError(
                f"{file} belongs to a run with another target, data set, drafter, batch or seed; "
                "give another output directory, or remove this one to start again"
            )
        say(f"going on from {file}")
        return saved
    return None


def read_state(file: Path) -> tuple[Saved, str]:
    """The content of a state file, and the key of the run it belongs to. Raises `SafetensorError` where it is not
    whole.
    """
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, **{moment: {} for moment in MOMENTS}}
    with safe_open(file, framework="pt") as opened:
        names = opened.keys()
        for full_name in names:
            part, _, name = full_name.partition(".")
            parts[part][name] = opened.get_tensor(full_name)
        metadata = opened.metadata()
    state = TrainingState(parts.pop("weights"), parts, int(metadata["updates"]))
    progress = Progress(**json.loads(metadata["progress"]))
    return Saved(state, progress._replace(tally=tuple(tuple(row) for row in progress.tally))), metadata["settings"]


class StopRequest:
    """Turns SIGINT and SIGTERM into a flag that is read at the end of a step; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.received = False
        self.since = 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if not self.received:
            self.received, self.since = True, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > SAME_KEYPRESS_SECONDS:
            raise KeyboardInterrupt
