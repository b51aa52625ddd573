"""A step: what each process takes of it, and how little its weights may move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.base.errors import UserError
from drafters.base.settings import build_settings
from tests.cpu.train.runs import make_place, recipe, run, weights
from tests.cpu.train.small import TWO_ROWS, packed
from train.config import TrainSettings
from train.target_features.features import Features
from train.trainer.run import check_batch
from train.trainer.schedule import rows_of_step
from train.trainer.state import Progress
from train.trainer.step import step_batches


class Asked:
    """A feature source of 14 rows that notes which ones are asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __len__(self) -> int:
        return 14

    def batch(self, rows: Sequence[int]) -> Features:
        self.rows += rows
        features = packed(TWO_ROWS, 14)
        return Features(*(tensor[[row % 2 for row in rows]] for tensor in features))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_process_takes_as_many_forwards_and_each_row_goes_to_one(tmp_path: Path, ranks: int) -> None:
    """Fault 15: a process with one forward more would wait for the others in a collective for ever."""
    settings = build_settings(TrainSettings, recipe(tmp_path, "x", batch={"rows_per_step": 8, "rows_per_forward": 3}))
    taken, forwards = [], set()
    for rank in range(ranks):
        source = Asked()
        setup: Any = SimpleNamespace(training=source)
        accelerator: Any = SimpleNamespace(process_index=rank, num_processes=ranks, device="cpu")
        batches = step_batches(settings, setup, Progress(step=6), accelerator)
        forwards.add(tuple(len(batch.features.token_ids) for batch in batches))
        taken += source.rows
    assert len(forwards) == 1 and sorted(taken) == sorted(rows_of_step(6, 8, 14, settings.seed))
    check_batch(settings, ranks)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    settings = build_settings(TrainSettings, recipe(tmp_path, "x", batch={"rows_per_step": 8}))
    with pytest.raises(UserError, match="batch.rows_per_step = 8 cannot be shared by 3 processes"):
        check_batch(settings, 3)


def test_norms_move_by_less_than_bf16_holds(tmp_path: Path) -> None:
    """Fault 12: from 1 the next number of bf16 is 2^-7 up and 2^-8 down, and half of that rounds to no change; masters
    are fp32.
    """
    optimizer = {"lr": 1e-4, "warmup_steps": 0}
    run(make_place(tmp_path), "bf16", dtype="bfloat16", curriculum=[{"steps": 2, "depth": 1}], optimizer=optimizer)
    found = weights(tmp_path / "bf16")
    norms = [
        weight for name, weight in found.items() if name.endswith("midlayer.input_layernorm.weight")
    ]  # they start at 1
    assert len(norms) == 1 and all(weight.dtype == torch.float32 for weight in found.values())
    moved = (norms[0] - 1).abs()
    assert (moved > 0).all() and moved.max() < 2**-9
