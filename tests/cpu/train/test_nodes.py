"""Two nodes, played by two launchers on this machine; what stops a launcher; a process that fails before the others
know of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.train.processes import CONFIGS, accelerate_environment, fork, free_port, one_process, written
from tests.cpu.train.runs import ENTRY, losses, make_place, run
from train.trainer.state import states

STEPS = 6
CONSTANT = {"lr": 2e-3, "warmup_steps": 3, "final_lr_ratio": 1.0}  # a rate that does not depend on the number of steps


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("nodes"))


def stages(steps: int) -> dict[str, Any]:
    return {"curriculum": [{"steps": steps, "depth": 2, "anchors_per_row": 8}], "optimizer": CONSTANT}


def on_node(place: Path, number: int, steps: int) -> list[str]:
    """The command's arguments on a node with directories of its own."""
    features = {"directory": str(place / f"features-of-{number}"), "rows_per_shard": 8, "per_node": True}
    return ["--config", written(place, f"node-{number}", features=features, **stages(steps)), "--debug"]


def start(config: str, arguments: list[str], *options: str) -> subprocess.Popen[str]:
    """A launcher."""
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
        *options,
    ]
    return subprocess.Popen(
        [*launch, str(ENTRY), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.long
def test_two_nodes_with_their_own_disks_train_and_resume(place: Path) -> None:
    """First without launchers, then resumed by two, for which `several-nodes.yaml` has its addresses replaced."""
    run(place, "one", **stages(STEPS))
    told = {**accelerate_environment("zero2", 2), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    fork(one_process, [({**told, "RANK": str(number)}, on_node(place, number, STEPS // 2)) for number in range(2)])

    port = str(free_port())
    both = [
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
    ]
    nodes = [start("several-nodes", on_node(place, n, STEPS), *both, "--machine_rank", str(n)) for n in range(2)]
    said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert "training in 2 processes" in said[0] and "training in" not in said[1]
    assert losses(place / "node-0") == pytest.approx(losses(place / "one"), rel=1e-4)
    assert not (place / "node-1").exists(), "only the first process of the first node writes"
    stored = [sorted(path.name for path in (place / f"features-of-{number}").rglob("shard-*")) for number in range(2)]
    assert stored[0] == stored[1] and len(stored[0]) > 2


@pytest.mark.long
def test_sigterm_to_the_launcher_saves_and_ends(place: Path) -> None:
    """As a scheduler sends it; torchrun passes it on to the processes."""
    steps = 400
    more = {"curriculum": [{"steps": steps, "depth": 1}], "checkpoint": {"every": 1, "keep": 1}}
    launcher = start("ddp-cpu", ["--config", written(place, "stopped", **more)])
    deadline = time.monotonic() + 200
    while not states(place / "stopped" / "states"):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    said, _ = launcher.communicate(timeout=60)
    assert f"of {steps}, state saved; the same command goes on from here" in said, said
    [left] = states(place / "stopped" / "states")
    done = int(left.name[5:12])
    assert 0 < done < steps and len(losses(place / "stopped")) == done


@pytest.mark.long
def test_a_process_that_fails_to_prepare_leaves_nobody_waiting(place: Path) -> None:
    """The first refuses a store that nobody agreed to, while the other waits for its index: the command ends, with the
    reason.
    """
    features = {"directory": str(place / "large"), "max_gigabytes": 1e-9}
    launcher = start("ddp-cpu", ["--config", written(place, "refused", features=features)])
    said, _ = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and "features.max_gigabytes = 1e-09: agree with --yes" in said
