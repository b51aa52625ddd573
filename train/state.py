"""Training state on disk: written beside and renamed, the newest complete one resumed, old ones removed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from drafters.errors import UserError
from train.visits import Tally

STATE_FILE = "state.pt"
PREFIX = "step-"


class Progress(NamedTuple):
    """Where a run stands: optimizer steps done, and the best predicted speed on held-out data so far.

    Data order, anchors and learning rate are functions of (seed, step), so the step is all they need. `tally` is what the drafter
    measured of itself (`visits.py`); empty before the first step.
    """

    step: int = 0
    best: float = 0.0
    tally: Tally = ()


def save_state(directory: Path, model: nn.Module, optimizer: Any, progress: Progress, settings_key: str, keep: int) -> Path:
    """Write `directory/step-N/state.pt` and remove all but the newest `keep`."""
    final = directory / f"{PREFIX}{progress.step:07d}"
    beside = directory / f".{final.name}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    content = {
        "model": {name: tensor for name, tensor in model.state_dict().items() if name not in frozen},
        "optimizer": optimizer.state_dict(),
        "progress": tuple(progress),
        "settings": settings_key,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(content, beside / STATE_FILE)
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    for old in complete_states(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def complete_states(directory: Path) -> list[Path]:
    """All complete states, oldest first."""
    return sorted(place for place in directory.glob(f"{PREFIX}*") if (place / STATE_FILE).is_file())


def load_state(place: Path, model: nn.Module, optimizer: Any, settings_key: str) -> Progress:
    """Restore model, optimizer and random generators; `UserError` where the state belongs to another drafter or data set."""
    content: dict[str, Any] = torch.load(place / STATE_FILE, map_location="cpu", weights_only=True)
    if content["settings"] != settings_key:
        raise UserError(
            f"{place} belongs to a run with another target, data set, drafter, batch or seed; "
            "give another output directory, or remove this one to start again"
        )
    missing, unexpected = model.load_state_dict(content["model"], strict=False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert set(missing) <= frozen and not unexpected, (missing, unexpected)
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["rng"])
    if content["cuda_rng"]:
        torch.cuda.set_rng_state_all(content["cuda_rng"])
    return Progress(*content["progress"])


class StopRequest:
    """While open, turns SIGINT and SIGTERM into a flag, read at the end of a step; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True
