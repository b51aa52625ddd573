"""DDP, ZeRO 1 to 3 and FSDP2 in two processes on CPUs, by the configs that ship: one process's gradients and losses,
exact resuming.

Tolerance: losses and norms of gradients within 1e-4 of one process's, weights and moments within 1e-3, relative, over
six steps: sums are taken in another order. A run that resumes in the same way as it was stopped continues bit for bit.

The one process takes the four rows of a step in one forward and keeps its activations; each of the two takes two
forwards of one row and recomputes. Adam does not see a gradient's scale: its norm and its moments show what it was
divided by.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.targets.target import load_target
from tests.cpu.train.processes import forked, launched
from tests.cpu.train.runs import make_place, run, weights
from train.trainer.state import states

HALF, WHOLE = 3, 6
CLIP = 0.2


def changes(steps: int, rows_per_forward: int = 1) -> dict[str, Any]:
    """Depth 2 with the bonus loss, and depth weights that come from what the run has measured so far."""
    return {
        "curriculum": [{"steps": steps, "depth": 2, "anchors_per_row": 8}],
        "optimizer": {
            "lr": 2e-3,
            "warmup_steps": 3,
            "final_lr_ratio": 1.0,
            "clip_norm": CLIP,
        },  # does not depend on the number of steps
        "batch": {"rows_per_step": 4, "rows_per_forward": rows_per_forward},
        "checkpoint": {"every": HALF},
        "loss": {
            "depth_weights": "visited",
            "bonus": 0.5,
            "recompute": rows_per_forward == 1,
        },
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `one`, a run in this process; the others are compared with it."""
    directory = make_place(tmp_path_factory.mktemp("spread"))
    run(directory, "one", **changes(WHOLE, rows_per_forward=4))
    norms = figures(directory / "one")[1]
    assert max(norms) > CLIP, "some gradients are clipped"
    return directory


def figures(directory: Path) -> tuple[list[float], list[float]]:
    """Losses and norms of gradients, step by step."""
    steps = [
        line for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()) if "loss" in line
    ]
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def trains_as_one(place: Path, output: str) -> None:
    for found, wanted in zip(figures(place / output), figures(place / "one"), strict=True):
        assert len(found) == WHOLE and found == pytest.approx(wanted, rel=1e-4)
    one, other = weights(place / "one"), weights(place / output)
    assert one.keys() == other.keys()
    for name in one:
        difference = float((other[name] - one[name]).norm() / one[name].norm())
        assert difference < 1e-3, (name, difference)


def serves(place: Path, output: str) -> None:
    """The drafter that was written loads into serving, with the weights of the state."""
    target, kept = load_target(str(place / "target"), "float32"), weights(place / output)
    served = load_drafter(place / output / "final-eagle3", target.facts, target.embed_weight)
    assert served.warnings == []
    for name, tensor in served.model.state_dict().items():
        assert name == "embed_tokens.weight" or torch.equal(tensor, kept[name].bfloat16().float()), name


@pytest.mark.parametrize("way", ["zero2", *(pytest.param(way, marks=pytest.mark.long) for way in ("zero3", "fsdp2"))])
def test_accelerate_launch_trains_as_one_process_does(place: Path, way: str) -> None:
    launched(place, f"{way}-launched", way, 2, **changes(WHOLE))
    trains_as_one(place, f"{way}-launched")
    serves(place, f"{way}-launched")


@pytest.mark.parametrize(
    "way", ["zero3", *(pytest.param(way, marks=pytest.mark.long) for way in ("ddp-cpu", "zero1", "zero2", "fsdp2"))]
)
def test_two_processes_train_as_one_does_and_resume_exactly(place: Path, way: str) -> None:
    forked(place, f"{way}-whole", way, 2, **changes(WHOLE))
    trains_as_one(place, f"{way}-whole")
    serves(place, f"{way}-whole")

    left_at_half(place / f"{way}-whole", place / f"{way}-parts")
    forked(place, f"{way}-parts", way, 2, **changes(WHOLE))
    assert figures(place / f"{way}-parts") == figures(place / f"{way}-whole")
    whole, parts = weights(place / f"{way}-whole"), weights(place / f"{way}-parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def left_at_half(whole: Path, parts: Path) -> None:
    """What the run `whole` would have left, had it been killed after the first of its two states."""
    shutil.copytree(whole, parts)
    _, second = states(parts / "states")
    second.unlink()
    shutil.rmtree(parts / "final-eagle3")


@pytest.mark.long
def test_a_state_goes_on_in_another_way_and_number_of_processes(place: Path) -> None:
    forked(place, "moved", "zero3", 2, **changes(HALF))
    forked(place, "moved", "fsdp2", 2, **changes(HALF + 1))
    run(place, "moved", **changes(HALF + 2))
    forked(place, "moved", "zero1", 2, **changes(WHOLE))
    trains_as_one(place, "moved")
