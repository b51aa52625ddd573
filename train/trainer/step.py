"""One optimizer step: rows, anchors, loss scales over all processes, forwards and backwards, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from train.config import LossSettings, Stage, TrainSettings
from train.costs.plan import Forward, Replayed
from train.objective.objective import Anchors, Counts, Scales, choose_anchors, count, step_counts, step_values
from train.objective.supervision import loss_scales, pooled_scales
from train.objective.visits import DepthCounts, DepthWeights, depth_weights, remember, serving_visits
from train.target_features.features import Features
from train.trainer.prepare import TrainingSetup
from train.trainer.run import Run
from train.trainer.schedule import learning_rate, rows_of_step, step_seed
from train.trainer.state import Progress


class StepResult(NamedTuple):
    """Numbers of one optimizer step, what the drafter has measured of itself by now, and what any process asks for.

    `interrupted`: to stop at once; `out_of_time`: to end with figures and a drafter.
    """

    values: dict[str, Any]
    tally: DepthCounts
    interrupted: bool
    out_of_time: bool


def train_step(run: Run, progress: Progress, interrupted: bool, out_of_time: bool) -> StepResult:
    """One optimizer step over `rows_per_step` rows, shared among the processes and cut into forwards of
    `rows_per_forward`.
    """
    started = time.monotonic()
    settings, accelerator, step = run.settings, run.accelerator, progress.step
    stage = settings.stage_at(step)
    batches = step_batches(settings, run.setup, progress, accelerator)
    counts = [count(batch.features, batch.anchors, stage.depth) for batch in batches]
    asked = torch.tensor([interrupted, out_of_time], dtype=torch.float64, device=accelerator.device)
    reduced: Any = accelerator.reduce(
        torch.cat((*(sum_of(numbers) for numbers in zip(*counts, strict=True)), asked)), "sum"
    )
    total = Counts(*reduced[:-2].view(3, -1))
    computed = total.sampled.tolist()
    weights = depth_weights(settings.loss, settings.serving, stage.depth, progress.tally)
    average = accelerator.num_processes  # the gradients of the processes are averaged, and should be summed
    scales = Scales(*([average * scale for scale in each] for each in scales_of(settings.loss, stage, weights, total)))
    torch.manual_seed(step_seed(settings.seed, step, accelerator.process_index))
    losses, sums = [], []
    for number, batch in enumerate(batches):
        is_last = number + 1 == len(batches)
        with run.strategy.forward_of(is_last):
            loss, part = run.strategy.module(batch.features, batch.anchors, stage.depth, scales)
            run.strategy.backward(loss, is_last)
        losses.append(loss.detach())
        sums.append(part)
    lr = learning_rate(settings, step)
    norm = run.strategy.update(lr)
    loss = torch.stack(losses).sum() / accelerator.num_processes
    totals: Any = accelerator.reduce(torch.cat((loss[None], sum_of(sums).flatten())), "sum")
    figures = totals[1:].view(stage.depth + 1, -1)
    values: dict[str, Any] = {
        "loss": float(totals[0]),
        **step_values(figures, computed),
        "depth_weights": weights.base,
    }
    tokens = sum(int((batch.features.document_ids > 0).sum()) for batch in batches) * accelerator.num_processes
    seconds = time.monotonic() - started
    values.update(
        depth=stage.depth, lr=lr, grad_norm=norm, predictions=int(sum(computed)), tokens_per_second=tokens / seconds
    )
    values["utilisation"] = run.meter.share(
        step, [forward_of(*pair) for pair in zip(batches, counts, strict=True)], seconds
    )
    run.metrics.write({"step": step + 1, **values})
    accuracy = [share for share in values["accuracy"] if share is not None] or [0.0]
    note = f"depth {stage.depth} loss {values['loss']:.3f} top-1 {accuracy[0]:.2f} .. {accuracy[-1]:.2f}"
    run.console.show("training", step + 1, settings.total_steps, note, run.meter.left(step + 1))
    tally = remember(progress.tally, step_counts(figures, computed))
    return StepResult(values, tally, bool(reduced[-2] > 0), bool(reduced[-1] > 0))


def scales_of(settings: LossSettings, stage: Stage, weights: DepthWeights, total: Counts) -> Scales:
    """What multiplies the loss sums of each depth, given the counts over all processes."""
    there_are, *computed = (numbers.tolist() for numbers in total)
    if not stage.replay:
        return Scales(*(loss_scales(w, there_are, number) for w, number in zip(weights, computed, strict=True)))
    tilts = [
        w if settings.depth_weights == "decay" else [1.0] * len(w) for w in weights
    ]  # sampled as visited: no need of a weight
    return Scales(
        *(pooled_scales(w, tilt, there_are, number) for w, tilt, number in zip(weights, tilts, computed, strict=True))
    )


class MicroBatch(NamedTuple):
    """What one forward reads."""

    features: Features
    anchors: Anchors


def step_batches(
    settings: TrainSettings, setup: TrainingSetup, progress: Progress, accelerator: Accelerator
) -> list[MicroBatch]:
    """This process's part of the rows of one step, with anchors. A row's anchors depend on its place in the step
    alone.
    """
    step, stage = progress.step, settings.stage_at(progress.step)
    deepest_shift = stage.depth - 2 * settings.serving.lookahead
    serving = serving_visits(settings.serving, deepest_shift, progress.tally) if stage.replay else None
    rows = rows_of_step(step, settings.batch.rows_per_step, len(setup.training), settings.seed)
    places = range(accelerator.process_index, len(rows), accelerator.num_processes)
    result = []
    for first in range(0, len(places), settings.batch.rows_per_forward):
        mine = places[first : first + settings.batch.rows_per_forward]
        features = Features(*(x.to(accelerator.device) for x in setup.training.batch([rows[place] for place in mine])))
        keys = [f"{settings.seed} {step} {place}" for place in mine]
        result.append(MicroBatch(features, choose_anchors(features, stage.anchors_per_row, keys, serving)))
    return result


def forward_of(batch: MicroBatch, counts: Counts) -> Forward:
    """The sizes of a micro-batch's work."""
    rows, length = batch.features.token_ids.shape
    teacher = int((batch.features.turn_ids[:, 1:] > 0).sum())
    rounds = batch.anchors.rounds
    replay = (
        Replayed(rounds.lookahead, int(rounds.shifts.max()) + rounds.lookahead - 1, rounds.refresh) if rounds else None
    )
    predictions = tuple(int(number) for number in counts.sampled.tolist())
    return Forward(rows, length, batch.anchors.places.shape[1], predictions, teacher, replay)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Elementwise sum of equal shapes."""
    return torch.stack(list(tensors)).sum(0)
