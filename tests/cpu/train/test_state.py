"""State files: what is read is what was written, whole or not at all, whenever the writer was killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from drafters.base.errors import UserError
from train.monitor.metrics import keep_until
from train.trainer.state import (
    MOMENTS,
    SAME_KEYPRESS_SECONDS,
    Progress,
    StopRequest,
    TrainingState,
    newest_state,
    save_state,
    states,
)


def state(number: float, size: int = 4) -> TrainingState:
    """Every element is `number`, so that a mixture of two states would show."""
    weights = {"fc.weight": torch.full((size, size), number), "norm.weight": torch.full((size,), number)}
    return TrainingState(weights, {moment: {k: 2 * v for k, v in weights.items()} for moment in MOMENTS}, int(number))


def number_in(directory: Path) -> float:
    """The number that the newest state is made of."""
    found = newest_state(directory, "key", lambda line: None)
    assert found is not None
    values = {float(v) for v in torch.cat([x.flatten() for x in found.state.weights.values()]).unique()}
    doubled = {float(v) for part in found.state.moments.values() for x in part.values() for v in x.unique()}
    assert values == {float(found.state.updates)} and doubled == {2 * v for v in values}
    assert found.progress.step == found.state.updates
    return values.pop()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(3, 5, generator=draw) for name in ("a.weight", "b.c.weight")}
    moments = {moment: {name: torch.randn(3, 5, generator=draw).abs() for name in weights} for moment in MOMENTS}
    progress = Progress(18, 0.1 + 0.2, ((1.0, 0.1 + 0.7), (3.0, 4.5)))
    save_state(tmp_path, TrainingState(weights, moments, 17), progress, "key", keep=1)
    found = newest_state(tmp_path, "key", print)
    assert found is not None and found.progress == progress and found.state.updates == 17
    for name, tensor in weights.items():
        assert torch.equal(found.state.weights[name], tensor)
        assert all(torch.equal(found.state.moments[moment][name], moments[moment][name]) for moment in MOMENTS)


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save_state(tmp_path, state(step), Progress(step, 0.5), "key", keep=2)
    assert [file.name for file in states(tmp_path)] == ["step-0000010.safetensors", "step-0000100.safetensors"]
    assert number_in(tmp_path) == 100


def test_a_torn_state_is_set_aside_with_a_message(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, state(step), Progress(step), "key", keep=5)
    newest, middle = tmp_path / "step-0000003.safetensors", tmp_path / "step-0000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-40])
    middle.write_bytes(b"")
    said: list[str] = []
    found = newest_state(tmp_path, "key", said.append)
    assert found is not None and found.progress.step == 1
    assert len(said) == 3 and "step-0000003.safetensors is damaged" in said[0] and "going on from" in said[2]
    assert [file.name for file in states(tmp_path)] == ["step-0000001.safetensors"]
    save_state(tmp_path, state(2), Progress(2), "key", keep=1)
    assert number_in(tmp_path) == 2, "a damaged newer file does not crowd out the good one"


def test_no_state_is_no_state_and_anothers_is_refused(tmp_path: Path) -> None:
    assert newest_state(tmp_path, "key", print) is None
    save_state(tmp_path, state(1), Progress(1), "other", keep=1)
    with pytest.raises(UserError, match="belongs to a run with another"):
        newest_state(tmp_path, "key", print)


def test_a_killed_writer_leaves_a_whole_state(tmp_path: Path) -> None:
    """Writers that do nothing else, killed 25 times at random moments: what is left is always a whole state, never an
    older one.
    """
    began = time.monotonic()
    save_state(tmp_path, state(1, 300), Progress(1), "key", keep=1)
    longest = max(0.06, 4 * (time.monotonic() - began))  # time for several states, on a busy machine too
    draw, newest, interrupted = random.Random(0), 1, 0
    for _ in range(25):
        child = multiprocessing.get_context("fork").Process(target=write_without_end, args=(tmp_path, newest))
        child.start()
        time.sleep(draw.uniform(0.0, longest))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        interrupted += any(left.name.startswith(".") for left in tmp_path.iterdir())
        found = number_in(tmp_path)
        assert found >= newest
        newest = int(found)
    assert newest > 1 and interrupted > 0, (newest, interrupted)
    save_state(tmp_path, state(newest + 1, 300), Progress(newest + 1), "key", keep=1)
    assert [file.name for file in tmp_path.iterdir()] == [f"step-{newest + 1:07d}.safetensors"]


def write_without_end(directory: Path, since: int) -> None:
    number = since
    while True:
        number += 1
        save_state(directory, state(number, 300), Progress(number), "key", keep=1)


def test_records_of_steps_that_are_done_again_go(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    keep_until(file, 3)
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "heldout": {}}\n{"step": 3}\n{"step": 4, "lo')
    keep_until(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "heldout": {}}\n'


def test_stop_signals_become_a_flag_and_a_second_ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    now = 100.0
    monkeypatch.setattr("train.trainer.state.time.monotonic", lambda: now)
    with StopRequest() as stop:
        assert not stop.received
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # passed on by the launcher: the same keypress
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
        now += SAME_KEYPRESS_SECONDS + 0.1
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat it
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
