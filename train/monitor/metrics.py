"""Metrics of a run: `metrics.jsonl` always, and Weights & Biases where it is on."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from drafters.base.files import atomic_write_text
from train.config import TrainSettings

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb-run-id"


class Metrics:
    """`metrics.jsonl`, one object a line, and Weights & Biases where it is on. Silent in all but the first process.

    Lines: one with `settings` for each start; `step` with the numbers of an optimizer step; `step` with `heldout`.
    """

    def __init__(self, settings: TrainSettings, output: Path, writes: bool, say: Callable[[str], None]) -> None:
        self.file, self.run = None, None
        if not writes:
            return
        output.mkdir(parents=True, exist_ok=True)
        self.file = (output / METRICS_FILE).open("a", encoding="utf-8")
        chosen = settings.model_dump(mode="json")
        self._line({"settings": chosen, "machine": machine()})
        if settings.wandb.mode != "disabled":
            self.run = start_wandb(settings, output, chosen, say)

    def write(self, values: dict[str, Any]) -> None:
        """Add one record."""
        self._line(values)
        if self.run is not None:
            flat = flatten({name: value for name, value in values.items() if name != "step"})
            self.run.log({name: value for name, value in flat.items() if value is not None}, step=values["step"])

    def close(self) -> None:
        """Finish the records."""
        if self.file is not None:
            self.file.close()
        if self.run is not None:
            self.run.finish()

    def _line(self, values: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()


def start_wandb(settings: TrainSettings, output: Path, chosen: dict[str, Any], say: Callable[[str], None]) -> Any:
    """The Weights & Biases run, the same one after a resume; None and one line that says why where it cannot start."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=60)
    remembered = output / WANDB_ID_FILE
    name = remembered.read_text(encoding="utf-8").strip() if remembered.is_file() else uuid4().hex[:8]
    options = {
        "project": settings.wandb.project,
        "mode": settings.wandb.mode,
        "dir": output,
        "config": chosen,
        "settings": quiet,
    }
    if settings.wandb.mode == "online":
        options["resume"] = "allow"
    try:
        run = wandb.init(id=name, name=output.name, **options)
    except (wandb.Error, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        say(
            f"Weights & Biases did not start ({reason}): going on without it, all numbers are in "
            f"{output / METRICS_FILE}; `wandb login`, wandb.mode=offline or wandb.mode=disabled help"
        )
        return None
    remembered.write_text(name + "\n", encoding="utf-8")
    return run


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One level of names for what cannot draw lists and mappings.

    Places in a list count with two digits; entries with a budget are named by it:
    {"accuracy": [.4, .3], "lagged": [{"budget": 6, "tau": 1.5}]} becomes
    {"accuracy/00": .4, "accuracy/01": .3, "lagged/budget_6/tau": 1.5}.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping | int | float | list | None):
            result |= flatten(
                {_place(index, entry): _body(entry) for index, entry in enumerate(value)}, f"{prefix}{name}/"
            )
        else:
            result[f"{prefix}{name}"] = value
    return result


def machine() -> str:
    """What the run computes on, in words."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    )
    return f"{device}, torch {torch.__version__}"


def _place(index: int, entry: Any) -> str:
    return f"budget_{entry['budget']}" if isinstance(entry, Mapping) and "budget" in entry else f"{index:02d}"


def _body(entry: Any) -> Any:
    return {name: value for name, value in entry.items() if name != "budget"} if isinstance(entry, Mapping) else entry


def keep_until(file: Path, step: int) -> None:
    """Leave in a file of records those up to `step`; a last line that was not written to its end goes too.

    Records of later steps were written by a run that ended before it saved its state; they will be written again.
    """
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line).get("step", 0) <= step]
    if kept != lines:
        atomic_write_text(file, "".join(kept))
