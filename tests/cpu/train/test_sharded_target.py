"""A target that the processes share: each holds half of it, and it teaches what the whole one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from drafters.base.errors import UserError
from drafters.targets.target import load_target
from tests.cpu.train.processes import fork, forked, free_port
from tests.cpu.train.rows import TAPS, rows
from tests.cpu.train.runs import heldout, losses, make_place, run
from train.target_features.features import Features, compute_features

STAGES = {"curriculum": [{"steps": 4, "depth": 2, "anchors_per_row": 8}], "optimizer": {"lr": 2e-3, "warmup_steps": 3}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("sharded"))


def in_one_of_two(rank: int, directory: Path, port: int) -> None:
    """Each process takes rows of its own, in the same number of forwards."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    target = load_target(str(directory), "float32", fuse_layers=False, shards=2)
    parameters = list(target.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    held = sum(parameter.to_local().numel() for parameter in parameters)
    assert abs(held / sum(parameter.numel() for parameter in parameters) - 0.5) < 0.02
    found = [compute_features(target, rows(4)[first : first + 2], TAPS) for first in (0, 2)][:: 1 if rank == 0 else -1]
    torch.save([list(features) for features in found], directory / f"found-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.long
def test_features_of_a_shared_target_are_those_of_the_whole_one(place: Path) -> None:
    port = free_port()
    fork(in_one_of_two, [(rank, place / "target", port) for rank in range(2)])
    target = load_target(str(place / "target"), "float32", fuse_layers=False)
    for rank in range(2):
        for number, found in enumerate(torch.load(place / "target" / f"found-{rank}.pt", weights_only=True)):
            first = 2 * (number if rank == 0 else 1 - number)
            wanted = compute_features(target, rows(4)[first : first + 2], TAPS)
            for name, a, b in zip(Features._fields, found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.long
@pytest.mark.parametrize(("mode", "way"), [("offline", "ddp-cpu"), ("online", "zero2"), ("online", "fsdp2")])
def test_training_beside_a_shared_target(place: Path, mode: str, way: str) -> None:
    run(place, "one", **STAGES)
    features = {
        "mode": mode,
        "target": "sharded",
        "directory": str(place / f"shared-{way}"),
        "rows_per_shard": 5,
        "rows_per_forward": 2,
    }
    output = forked(place, f"{mode}-{way}", way, 2, features=features, **STAGES)
    assert losses(output) == pytest.approx(losses(place / "one"), rel=1e-4)
    assert heldout(output)["loss"] == pytest.approx(heldout(place / "one")["loss"], rel=1e-3)


def test_groups_have_to_fit_the_processes(place: Path) -> None:
    with pytest.raises(UserError, match="1 processes cannot form groups of 2"):
        load_target(str(place / "target"), "float32", fuse_layers=False, shards=2)
