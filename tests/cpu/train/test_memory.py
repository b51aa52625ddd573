"""Planned memory against what autograd really keeps, and against a real run of the CPU recipe."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.targets.head import TargetHead
from tests.cpu.train.small import packed
from train.config import LossSettings
from train.costs.memory import SLACK, Part, Place, Sharding, launch_sharding, memory, moved_bytes, peak, saved_bytes
from train.costs.plan import Forward, parameters
from train.objective.objective import Objective, Scales, choose_anchors, count
from train.target_features.features import Features

ROOT = Path(__file__).parents[3]
LENGTH = 128
CONFIG = DrafterConfig(
    hidden_size=64,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=3,
    rope_theta=100.0,
    max_position_embeddings=256,
    vocab_size=300,
    draft_vocab_size=256,
    target_hidden_size=64,
    tap_hidden_states_ids=(1, 2, 3),
)


def features() -> Features:
    """Two rows with the sizes of CONFIG."""
    base = packed([[(100, [0] * 20 + [1] * 80)], [(120, [0] * 50 + [1] * 70)]], LENGTH)
    wide = {"taps": torch.randn(2, LENGTH, 3 * 64).bfloat16(), "last_hidden": torch.randn(2, LENGTH, 64).bfloat16()}
    return base._replace(**wide)


@pytest.mark.parametrize("depth", [0, 1, 6])
def test_what_autograd_keeps_is_what_is_planned(depth: int) -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(CONFIG)
    drafter.embed_tokens.weight.data.normal_()
    objective = Objective(drafter, TargetHead(torch.randn(256, 64)), torch.arange(256), LossSettings(), torch.bfloat16)
    batch, kept = features(), {}
    anchors = choose_anchors(batch, 40, ["a", "b"])
    inputs = (*batch, anchors.places, anchors.valid, *drafter.parameters(), *drafter.buffers())
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weight_copy = (
            tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and tensor.shape[0] not in (2 * LENGTH, 2 * 40)
        )
        if storage.data_ptr() not in given and not weight_copy:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor stays, so that no address is used twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = objective(batch, anchors, depth, Scales([1.0] * (depth + 1), [1.0] * (depth + 1)))
    sampled = tuple(int(number) for number in count(batch, anchors, depth).sampled)
    planned = saved_bytes(CONFIG, Forward(2, LENGTH, 40, sampled, 150), recompute=False)
    assert sum(size for size, _ in kept.values()) == pytest.approx(sum(planned.values()), rel=0.1)
    loss.backward()


def test_ranks_share_what_their_sharding_says() -> None:
    forward, trained = Forward(2, LENGTH, 40, (50, 40), 60), parameters(CONFIG).trained

    def states(sharding: Sharding) -> list[float]:
        parts = {p.name: p.size for p in memory(CONFIG, forward, Place(4, sharding, True, 0.0), False)}
        return [parts[name] / trained for name in ("fp32 weights", "gradients", "Adam's moments")]

    assert states(Sharding.NONE) == [4, 4, 8]
    assert states(Sharding.ZERO1) == [4, 4, 2]
    assert states(Sharding.ZERO2) == [4, 1, 2]
    assert states(Sharding.ZERO3) == states(Sharding.FSDP2) == [1, 1, 2]


def test_accelerate_configs_say_how_a_run_is_spread(tmp_path: Path) -> None:
    found = {file.stem: launch_sharding(str(file)) for file in (ROOT / "recipes" / "accelerate").glob("*.yaml")}
    assert (
        launch_sharding(None) == (1, Sharding.NONE)
        and found["ddp"] == (8, Sharding.NONE)
        and found["fsdp2"] == (8, Sharding.FSDP2)
    )
    assert [found[f"zero{n}"][1] for n in (1, 2, 3)] == [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]
    assert found["several-nodes"][0] == 16
    (tmp_path / "x.yaml").write_text("distributed_type: MEGATRON_LM\nnum_processes: 8\n")
    with pytest.raises(UserError, match="'MEGATRON_LM'.*cannot be planned for"):
        launch_sharding(str(tmp_path / "x.yaml"))


def test_the_allocator_takes_more_of_what_comes_and_goes() -> None:
    assert peak([Part("a", 10.0), Part("b", 100.0, shifts=True)]) == 10.0 + SLACK * 100.0


def test_bytes_that_move_between_ranks() -> None:
    trained = parameters(CONFIG).trained
    launches = ((1, Sharding.NONE), (4, Sharding.NONE), (4, Sharding.ZERO3))
    alone, four, sharded = (moved_bytes(CONFIG, ranks, sharding, 8, 64) for ranks, sharding in launches)
    assert (
        alone.exchanged == 0 and four.exchanged == 2 * 0.75 * 4 * trained and sharded.exchanged == 1.5 * four.exchanged
    )
    assert alone.features == 4 * four.features == 8 * 64 * (4 * 64 * 2 + 24)


FOUR_LAYERS = [
    "drafter.num_hidden_layers=4",
    "batch.rows_per_forward=8",
    "loss={cross_entropy: 1.0, depth_weights: decay, gamma: 0.9}",
]


def held(process: int) -> int:
    """Bytes a process holds now and could not drop: its own pages and its libraries, without those mapped from weights
    and features.
    """
    size, counts = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = not line.endswith(".safetensors")
        elif line.startswith("Rss:") and counts:
            size += 1024 * int(line.split()[1])
    return size


def most_held(command: list[str]) -> int:
    """The largest `held` of a command that has to succeed."""
    most = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                most = max(most, held(process.pid))
            time.sleep(0.1)
    assert process.returncode == 0, command
    return most


def command(features: Path, output: Path, steps: int, changes: Sequence[str] = ()) -> list[str]:
    """A run of the CPU recipe on a small part of its data."""
    script = [
        sys.executable,
        str(ROOT / "train" / "eagle3_selfcond.py"),
        "--config",
        "recipes/smollm2-135m/train.yaml",
    ]
    small = [
        "data.max_conversations=120",
        "data.heldout_conversations=20",
        "heldout.max_rows=4",
        f"features.directory={features}",
    ]
    return [
        *script,
        *small,
        f"output={output}",
        f"curriculum=[{{steps: {steps}, depth: 11, anchors_per_row: 48}}]",
        *changes,
    ]


@pytest.fixture(scope="module")
def made_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made before: their making is not the peak that is planned."""
    folder = tmp_path_factory.mktemp("features")
    subprocess.run(command(folder, folder / "run", 1), cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("changes", [pytest.param([], id="shipped"), pytest.param(FOUR_LAYERS, id="four-layers")])
def test_a_run_of_the_cpu_recipe_peaks_where_the_plan_says(
    changes: list[str], made_features: Path, tmp_path: Path
) -> None:
    """Twelve steps at depth 11: the most that the process holds against `--dry-run`."""
    run = command(made_features, tmp_path, 12, changes)
    measured = most_held(run)
    plan = subprocess.run(
        [*run, "--dry-run", "--gpu", "cpu"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"│ peak +│ +([\d.]+) GB", plan)
    assert found and float(found[1]) * 1e9 == pytest.approx(measured, rel=0.2)
