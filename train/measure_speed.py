"""How much of a training step are its bare matrix products, and what its memory grows with: measured here, on a
recipe's own shapes.

Weights and features are random, so nothing is downloaded and no target runs.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from data.chat.pack import PackedRow
from drafters.base.errors import CommandParser, UserError, run_command
from drafters.base.settings import load_settings
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.targets.head import TargetHead
from drafters.targets.target import DTYPES
from train.config import LossSettings, Stage, TrainSettings
from train.costs.plan import Forward, Product, products
from train.costs.sizes import drafter_config, target_size
from train.costs.throughput import measured_seconds
from train.dry_run import packed_rows
from train.objective.objective import Objective, Scales, choose_anchors, count
from train.parallel import malloc
from train.target_features.features import Features
from train.trainer.run import make_optimizer
from train.trainer.step import MicroBatch, forward_of

EXAMPLES = """\
  python -m train.measure_speed --config recipes/smollm2-135m/train.yaml --depth 13
  python -m train.measure_speed --config recipes/smollm2-135m/train.yaml --depth 13 batch.rows_per_forward=4"""


class Measured(NamedTuple):
    """Seconds of a step and of its bare products, and what the products are."""

    step: float
    products: float
    rows: list[list[str]]

    @property
    def share(self) -> float:
        """The step's model FLOP utilisation, measured against products of the same shapes."""
        return self.products / self.step


def main(argv: list[str]) -> int:
    """The command."""
    parser = CommandParser("python -m train.measure_speed", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "--config", required=True, action="append", metavar="RECIPE", help="a training recipe; several: each on top"
    )
    parser.add_argument("--depth", type=int, metavar="D", help="deepest step [the curriculum's last stage]")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps measured, after one that is not [3]")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    options = parser.parse_intermixed_args(argv)
    if options.steps < 1 or (options.depth is not None and options.depth < 0):
        raise UserError(
            f"--steps = {options.steps}, --depth = {options.depth}: at least one step, and no negative depth"
        )
    settings = load_settings(TrainSettings, options.config, options.overrides)
    stage = (
        settings.curriculum[-1]
        if options.depth is None
        else settings.curriculum[-1].model_copy(update={"depth": options.depth})
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    measured = measure(settings, Path(options.config[0]), stage, options.steps)
    table = Table(title=f"Matrix products of a step at depth {stage.depth}", title_justify="left")
    for heading in ("product", "shape", "times", "GFLOP", "ms alone", "GFLOP/s"):
        table.add_column(heading, justify="left" if heading == "product" else "right")
    for row in measured.rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        f"step {1e3 * measured.step:.0f} ms, its products alone {1e3 * measured.products:.0f} ms: "
        f"share {measured.share:.1%}"
    )
    return 0


def measure(settings: TrainSettings, recipe: Path, stage: Stage, steps: int) -> Measured:
    """Time optimizer steps of one micro-batch over random features, and each of their products alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, target = DTYPES[settings.dtype], target_size(settings.target, recipe)
    config = drafter_config(settings, target.config)
    rows = packed_rows(settings, target).rows
    torch.manual_seed(0)
    objective = random_objective(config, settings.loss, dtype).to(device)
    optimizer = make_optimizer(settings, objective)
    seconds, parts = [], []
    for step in range(steps + 1):
        together = [
            rows[(step * settings.batch.rows_per_forward + i) % len(rows)]
            for i in range(settings.batch.rows_per_forward)
        ]
        features = random_features(together, config, dtype, device)
        started = time.perf_counter()
        parts = products(config, one_step(objective, optimizer, features, stage))
        seconds.append(time.perf_counter() - started)
    alone = [measured_seconds(part, device, dtype) * part.calls for part in parts]
    listed = [_row(part, spent) for part, spent in zip(parts, alone, strict=True) if spent > 0.005 * sum(alone)]
    return Measured(median(seconds[1:]), sum(alone), listed)


def one_step(objective: Objective, optimizer: torch.optim.Optimizer, features: Features, stage: Stage) -> Forward:
    """Forward, backward and update of one micro-batch, as training does them; returns its sizes."""
    anchors = choose_anchors(features, stage.anchors_per_row, [str(row) for row in range(len(features.token_ids))])
    counts = count(features, anchors, stage.depth)
    every = [1.0] * (stage.depth + 1)
    loss, _ = objective(features, anchors, stage.depth, Scales(every, every))
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in objective.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if features.taps.is_cuda:
        torch.cuda.synchronize()
    return forward_of(MicroBatch(features, anchors), counts)


def random_objective(config: DrafterConfig, loss: LossSettings, dtype: torch.dtype) -> Objective:
    """A drafter and a target's head with random weights; the draft vocabulary is the first tokens."""
    drafter = Eagle3Drafter(config)
    drafter.embed_tokens.weight.data.normal_()
    head = TargetHead(torch.randn(config.draft_vocab_size, config.target_hidden_size).to(dtype))
    objective = Objective(drafter, head, torch.arange(config.draft_vocab_size), loss, dtype)
    objective.weights_are_whole = True
    return objective


def random_features(
    rows: Sequence[PackedRow], config: DrafterConfig, dtype: torch.dtype, device: torch.device
) -> Features:
    """Packed rows as a target might see them, with random taps; its predictions are nearly uniform."""
    ids = {name: torch.from_numpy(np.stack([getattr(row, name) for row in rows])).long() for name in PackedRow._fields}
    shape, width = ids["token_ids"].shape, config.target_hidden_size
    numbers = {
        "taps": torch.randn(*shape, 3 * width).to(dtype),
        "last_hidden": torch.randn(*shape, width).to(dtype) / width**0.5,
        "log_normaliser": torch.full(shape, math.log(config.vocab_size) + 1.0),
        "argmax": torch.randint(config.vocab_size, shape),
    }
    return Features(**{name: tensor.to(device) for name, tensor in {**ids, **numbers}.items()})


def _row(part: Product, seconds: float) -> list[str]:
    shape = f"{part.m} x {part.k} x {part.n}"
    times = f"{part.batch} x {part.calls}"
    return [
        part.name,
        shape,
        times,
        f"{part.flops / 1e9:.1f}",
        f"{1e3 * seconds:.1f}",
        f"{part.flops / 1e9 / seconds:.0f}",
    ]


if __name__ == "__main__":
    malloc.set_up()
    sys.exit(run_command(main))
