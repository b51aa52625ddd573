"""Training commands in several processes at once, under the configs for accelerate that ship.

`launched` is `accelerate launch` itself, which imports everything in each process; `forked` gives processes the same
environment, but forks them from one that has imported everything, and takes a second or two.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser

from drafters.base.errors import run_command
from tests.cpu.train.runs import ROOT, command, recipe
from train import eagle3_selfcond

CONFIGS = ROOT / "recipes" / "accelerate"
PRELOADED = [  # what takes long to import
    "tests.cpu.train.processes",
    "train.trainer.loop",
    "train.trainer.prepare",
    "train.parallel.zero",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "deepspeed.runtime.zero.muon.original_muon",
]
PATIENCE = 200.0  # seconds


def launched(place: Path, output: str, config: str, processes: int, **changes: Any) -> Path:
    """Train under `accelerate launch` on CPUs. Returns the run's directory."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    done = command(
        ["--config", written(place, output, **changes), "--debug"],
        [*launch, "--num_processes", str(processes)],
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"training in {processes} process" in done.stdout + done.stderr
    return place / output


def forked(place: Path, output: str, config: str, processes: int, **changes: Any) -> Path:
    """Train in processes with the environment that `accelerate launch` gives them. Returns the run's directory."""
    told = {**accelerate_environment(config, processes), "LOCAL_WORLD_SIZE": str(processes)}
    arguments = ["--config", written(place, output, **changes), "--debug"]
    fork(one_process, [({**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}, arguments) for rank in range(processes)])
    return place / output


def fork(function: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `function` once for each of `arguments`, each in a process of its own, all at once."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ["DS_ACCELERATOR"] = "cpu"
    children = [context.Process(target=function, args=given) for given in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
        child.kill()
    assert [child.exitcode for child in children] == [0] * len(children)


def written(place: Path, output: str, **changes: Any) -> str:
    """A recipe's file."""
    file = place / f"{output}.yaml"
    file.write_text(yaml.safe_dump(recipe(place, output, **changes)))
    return str(file)


def accelerate_environment(config: str, processes: int) -> dict[str, str]:
    """What `accelerate launch --config_file` and torchrun tell each process, but for its number."""
    given = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), "script"]
    told: dict[str, str] = {}
    with patch("torch.distributed.run.run", lambda _: told.update(os.environ)):  # in the place of torchrun
        launch_command(launch_command_parser().parse_args(given))
    assert told, "accelerate did not come to the start of its processes"
    return {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def one_process(environment: dict[str, str], arguments: Sequence[str]) -> None:
    """The command in a forked process."""
    os.environ.update(environment, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    sys.exit(run_command(eagle3_selfcond.main, list(arguments)))
