"""A training that is killed at any moment goes on from a whole state, and ends with the weights of one that was left
alone.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.cpu.train.runs import ENTRY, losses, make_place, recipe, weights
from train.trainer.state import states

KILLS, STEPS = 20, 260
START_SECONDS = 120.0  # for the imports of a process on a busy machine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("kill"))


def start(place: Path, output: str) -> subprocess.Popen[str]:
    """The command, with a state after every step."""
    changes = {"curriculum": [{"steps": STEPS, "depth": 1}], "checkpoint": {"every": 1, "keep": 2}, "dtype": "float32"}
    file = place / f"{output}.yaml"
    file.write_text(yaml.safe_dump(recipe(place, output, **changes)))
    arguments = [sys.executable, str(ENTRY), "--config", str(file)]
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "RANK": ""}
    )


def steps_done(directory: Path) -> int:
    """The step of the newest state file, 0 without one."""
    found = states(directory)
    return int(found[-1].name[5:12]) if found else 0


def await_writing(process: subprocess.Popen[str], directory: Path, more_than: int) -> None:
    """Wait until a state newer than `more_than` is there, and then until the next one is being written."""
    deadline = time.monotonic() + START_SECONDS
    while steps_done(directory) <= more_than or not any(directory.glob(".step-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.0005)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_twenty_times_it_ends_like_one_that_was_left_alone(place: Path) -> None:
    whole = start(place, "whole")
    draw, newest, torn = random.Random(0), 0, 0
    directory = place / "killed" / "states"
    for number in range(KILLS):
        process = start(place, "killed")
        await_writing(process, directory, newest)
        if number % 2:  # anywhere, instead of in the middle of writing
            time.sleep(draw.uniform(0.0, 0.05))
        process.kill()
        said = process.communicate()[0]
        torn += any(directory.glob(".step-*"))
        assert steps_done(directory) > newest
        assert newest == 0 or f"going on from {directory}" in said and "damaged" not in said, said
        newest = steps_done(directory)
    assert torn >= 5, torn
    process = start(place, "killed")
    assert process.wait() == 0 and whole.wait() == 0
    assert losses(place / "killed") == losses(place / "whole") and len(losses(place / "whole")) == STEPS
    one, two = weights(place / "whole"), weights(place / "killed")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.long
def test_a_stop_signal_saves_and_ends_with_status_zero(place: Path) -> None:
    process = start(place, "stopped")
    await_writing(process, place / "stopped" / "states", 1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    step = steps_done(place / "stopped" / "states")
    assert 0 < step < STEPS and f"stopped after step {step} of {STEPS}, state saved" in said
    assert len(losses(place / "stopped")) == step
