"""The constant parts of a run: settings, module, optimizer, parallel strategy, metrics; and how they are made."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from drafters.base.errors import UserError
from drafters.targets.target import DTYPES
from train.config import TrainSettings
from train.costs.throughput import Meter
from train.monitor.console import Console
from train.monitor.metrics import Metrics
from train.objective.objective import Objective
from train.parallel.strategy import ParallelStrategy, TorchStrategy
from train.trainer.prepare import TrainingSetup


class Run(NamedTuple):
    """What stays the same from the first step to the last."""

    settings: TrainSettings
    setup: TrainingSetup
    console: Console
    accelerator: Accelerator
    objective: Objective  # the plain module; `strategy.module` wraps it for several processes
    strategy: ParallelStrategy
    metrics: Metrics
    meter: Meter

    @property
    def output(self) -> Path:
        """The run's directory."""
        return Path(self.settings.output)


def check_batch(settings: TrainSettings, num_processes: int) -> None:
    """Refuse a batch that the processes cannot share equally: each takes the same number of rows in the same number of
    forwards.
    """
    if settings.batch.rows_per_step % num_processes:
        raise UserError(
            f"batch.rows_per_step = {settings.batch.rows_per_step} cannot be shared by {num_processes} processes; "
            "take a multiple of it"
        )


def make_objective(settings: TrainSettings, setup: TrainingSetup) -> Objective:
    """The module that is trained."""
    vocab = setup.start.vocab.draft_to_target
    head = setup.target.head.rows(vocab)
    return Objective(setup.start.drafter, head, vocab, settings.loss, DTYPES[settings.dtype])


def make_optimizer(settings: TrainSettings, objective: Objective) -> torch.optim.AdamW:
    """AdamW over fp32 masters; norms are not decayed."""
    options = settings.optimizer
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


def parallel_strategy(accelerator: Accelerator, objective: Objective, settings: TrainSettings) -> ParallelStrategy:
    """The objective and its optimizer under the parallel strategy that accelerate was configured for."""
    objective.weights_are_whole = accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    optimizer, clip_norm = make_optimizer(settings, objective), settings.optimizer.clip_norm
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return TorchStrategy(accelerator, objective, optimizer, clip_norm)
    from train.parallel import zero  # importing DeepSpeed takes seconds

    zero.configure(accelerator, settings.batch.rows_per_forward, clip_norm)
    return zero.ZeroStrategy(accelerator, objective, optimizer)
