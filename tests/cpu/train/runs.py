"""Tiny training runs for tests: a target with conversations, a recipe, what a run leaves, and the command."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import torch

from drafters.base.settings import build_settings
from tests.tiny import save_tiny_target
from train.config import TrainSettings
from train.monitor.console import Console
from train.parallel.launch import rank
from train.trainer.feature_sources import Caller
from train.trainer.loop import train
from train.trainer.prepare import prepare
from train.trainer.state import read_state, states

ROOT = Path(__file__).parents[3]
ENTRY = ROOT / "train" / "eagle3_selfcond.py"


def make_place(directory: Path) -> Path:
    """A tiny target and conversations for it, in `directory`."""
    save_tiny_target(directory / "target")
    draw = random.Random(0)
    with (directory / "data.jsonl").open("w") as file:
        for number in range(40):
            answer = "".join(draw.choice("abc ") for _ in range(draw.randint(10, 30)))
            messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")
    return directory


def recipe(place: Path, output: str, **changes: Any) -> dict[str, Any]:
    return {
        "target": str(place / "target"),
        "output": str(place / output),
        "dtype": "float32",
        "data": {"paths": [str(place / "data.jsonl")], "row_length": 96, "heldout_conversations": 6},
        "features": {"directory": str(place / "features"), "rows_per_shard": 8},
        "drafter": {"draft_vocab_size": 32, "num_hidden_layers": 2},
        "optimizer": {"lr": 2e-3, "warmup_steps": 3},
        "curriculum": [{"steps": 5, "depth": 1, "anchors_per_row": 8}, {"steps": 3, "depth": 3, "anchors_per_row": 4}],
        "batch": {"rows_per_step": 4, "rows_per_forward": 2},
        "serving": {"lookahead": 2},
        "heldout": {"every": 100, "budgets": [6], "max_rows": 2},
        "checkpoint": {"every": 100},
        **changes,
    }


def run(place: Path, output: str, **changes: Any) -> Path:
    settings = build_settings(TrainSettings, recipe(place, output, **changes))
    console = Console(speaks=False)
    return train(settings, prepare(settings, Caller("cpu", rank(), False, console.say, console.show)), console)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights and moments in the newest state."""
    saved, _ = read_state(states(directory / "states")[-1])
    return saved.state.weights | {
        f"{name} {moment}": x for moment, part in saved.state.moments.items() for name, x in part.items()
    }


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def heldout(directory: Path) -> dict[str, Any]:
    """The held-out figures that were measured last."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["heldout"] for line in lines if "heldout" in line][-1]


def command(arguments: list[str], launcher: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, str(ENTRY), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
