"""`--dry-run`: what a recipe takes, before anything is downloaded, loaded or rented. Models are built on the meta
device only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from data.chat.conversations import read_conversations
from data.chat.pack import PackedRow, pack
from data.chat.render import render_all
from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import DrafterConfig
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.config import Stage, TrainSettings
from train.costs.gpus import USABLE, Gpu, gpu_named
from train.costs.memory import SLACK, Part, Place, Sharding, memory, moved_bytes, peak
from train.costs.plan import Forward, Product, flops, forwards, parameters, products, replayed
from train.costs.sizes import TargetSize, drafter_config, target_size
from train.costs.throughput import measured_seconds
from train.target_features.store import store_bytes
from train.trainer.training_data import split

LAUNCHES = 1e-3  # seconds of a layer of a drafter step on a GPU at least, both ways: some 200 launches of 5 us


class Launch(NamedTuple):
    """On what the run would be: `share` is the expected model FLOP utilisation."""

    device: str
    ranks: int
    sharding: Sharding
    share: float


class Rows(NamedTuple):
    """Packed training rows, whether they are the real ones, and what is known of them in words."""

    rows: list[PackedRow]
    counted: bool
    note: str

    @property
    def turns(self) -> list[list[int]]:
        """For each row the sizes of its turns."""
        return [turn_sizes(row) for row in self.rows]


class Cost(NamedTuple):
    """Of one optimizer step in a stage: all ranks' FLOPs, seconds, and a rank's memory at its peak."""

    stage: Stage
    predictions: float
    flops: float
    seconds: float
    parts: list[Part]


class RunEstimate(NamedTuple):
    """Everything that is printed."""

    settings: TrainSettings
    launch: Launch
    target: TargetSize
    config: DrafterConfig
    rows: Rows
    device: Gpu
    costs: list[Cost]


def dry_run(settings: TrainSettings, recipe: Path, launch: Launch, console: Console) -> None:
    """Print the plan of a run."""
    plan = estimate(settings, recipe, launch)
    console.print(_facts(plan))
    console.print(_stages(plan))
    console.print(_memory(plan))
    for line in _conclusions(plan):
        console.print(line, highlight=False, soft_wrap=True)


def estimate(settings: TrainSettings, recipe: Path, launch: Launch) -> RunEstimate:
    """Sizes, rows and costs of a run."""
    if settings.batch.rows_per_step % launch.ranks:
        raise UserError(
            f"batch.rows_per_step = {settings.batch.rows_per_step} cannot be shared by {launch.ranks} ranks; "
            "take a multiple"
        )
    target = target_size(settings.target, recipe)
    config = drafter_config(settings, target.config)
    with torch.device("meta"):
        counted = sum(p.numel() for p in Eagle3Drafter(config).parameters())
    assert counted == sum(parameters(config)), (counted, parameters(config))
    rows, device = packed_rows(settings, target), this_cpu() if launch.device == "cpu" else gpu_named(launch.device)
    turns = rows.turns
    costs = [stage_cost(settings, launch, target, config, turns, device, stage) for stage in settings.curriculum]
    return RunEstimate(settings, launch, target, config, rows, device, costs)


def packed_rows(settings: TrainSettings, target: TargetSize) -> Rows:
    """Pack the data as training would, where data and tokenizer are on this machine; else one row full of answer
    stands for all.
    """
    length = settings.data.row_length
    full = PackedRow(
        np.ones(length, np.int64), np.ones(length, np.int32), np.ones(length, np.int32), np.arange(length)
    )
    assumed = "rows full of answer tokens are taken for them"
    if target.directory is None:
        return Rows([full], False, f"not counted, the target's tokenizer is not on this machine: {assumed}")
    from transformers import AutoTokenizer

    try:
        conversations = [
            c for path in settings.data.paths for c in read_conversations(path, settings.data.max_conversations)
        ]
        kept, _ = split(conversations, settings.data.heldout_conversations)
    except UserError as error:
        return Rows([full], False, f"not counted ({error}): {assumed}")
    examples = render_all(
        kept, AutoTokenizer.from_pretrained(target.directory), length, settings.data.template
    ).examples
    rows = pack(examples, length)
    answers = sum(int((row.turn_ids > 0).sum()) for row in rows)
    return Rows(
        rows, True, f"{len(examples):,} conversations, {answers:,} answer tokens in {len(rows):,} rows of {length}"
    )


def turn_sizes(row: PackedRow) -> list[int]:
    """The number of tokens of each assistant turn in a row."""
    sizes: dict[tuple[int, int], int] = {}
    for turn, document in zip(row.turn_ids.tolist(), row.document_ids.tolist(), strict=True):
        if turn:
            sizes[document, turn] = sizes.get((document, turn), 0) + 1
    return list(sizes.values())


def stage_cost(
    settings: TrainSettings,
    launch: Launch,
    target: TargetSize,
    config: DrafterConfig,
    turns: list[list[int]],
    device: Gpu,
    stage: Stage,
) -> Cost:
    """One step of a stage on average over the data; memory for the largest of its forwards."""
    done = stage_forwards(settings, stage, turns, launch.ranks)
    number = sum(forward.rows for forward in done) / settings.batch.rows_per_step
    total_flops = sum(flops(products(config, forward)) for forward in done) / number
    if settings.features.mode == "online":
        total_flops += 2 * target.multiplied * settings.batch.rows_per_step * settings.data.row_length
    largest = max(done, key=lambda forward: (forward.anchors, sum(forward.predictions)))
    parts = memory(config, largest, _place(settings, launch, target), settings.loss.recompute)
    seconds = total_flops / (launch.ranks * device.flops * launch.share)
    if launch.device != "cpu":
        steps = sum(forward.passes * config.num_hidden_layers for forward in done) / number / launch.ranks
        seconds = max(seconds, steps * LAUNCHES)
    return Cost(stage, sum(sum(forward.predictions) for forward in done) / number, total_flops, seconds, parts)


def stage_forwards(settings: TrainSettings, stage: Stage, turns: list[list[int]], ranks: int) -> list[Forward]:
    """The micro-batches of one pass over the data; a rank's forward holds no more rows than its share of a step."""
    together = min(settings.batch.rows_per_forward, settings.batch.rows_per_step // ranks)
    enough = turns * together if len(turns) < together else turns
    full = enough[: len(enough) - len(enough) % together]
    done = forwards(full, settings.data.row_length, stage.depth, stage.anchors_per_row, together)
    serving = settings.serving
    return (
        [replayed(forward, serving.lookahead, serving.refresh, stage.depth) for forward in done]
        if stage.replay
        else done
    )


def this_cpu() -> Gpu:
    """This machine's cores as a device: their rate is measured on one product, their memory read."""
    product = Product("x", 2048, 576, 1536)
    rate = product.flops / measured_seconds(product, torch.device("cpu"), torch.bfloat16, seconds=0.2)
    return Gpu(rate, float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 0.0)


def count(number: float) -> str:
    """4-digit numbers with a letter: 20_400_000 is 20.4M."""
    for power, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.3g}{letter}" if number < 999.5 * power else f"{number / power:.0f}{letter}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """Bytes in MB or GB."""
    return f"{number / 1e9:,.2f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def _place(settings: TrainSettings, launch: Launch, target: TargetSize) -> Place:
    return Place(launch.ranks, launch.sharding, launch.device != "cpu", _target_share(settings, launch, target))


def _target_share(settings: TrainSettings, launch: Launch, target: TargetSize) -> float:
    """Bytes of the target's weights in a rank that trains. Head and embeddings are whole in each, and all that stored
    features leave.
    """
    whole = _target_bytes(settings, target)
    end = target.config.vocab_size * target.config.hidden_size * whole / target.parameters
    if settings.features.mode == "offline":
        return end if target.config.tie_word_embeddings else 2 * end
    if settings.features.target == "whole":
        return whole
    gathered = 2 * (whole - 2 * end) / target.config.num_hidden_layers  # a layer at work and the next
    return whole / launch.ranks + 2 * end + gathered


def _target_bytes(settings: TrainSettings, target: TargetSize) -> float:
    return (2 if settings.dtype == "bfloat16" else 4) * target.parameters


def _store_bytes(plan: RunEstimate) -> int:
    tokens = len(plan.rows.rows) * plan.settings.data.row_length if plan.rows.counted else 10**6
    return store_bytes(1, tokens, plan.config.target_hidden_size)


def _facts(plan: RunEstimate) -> Table:
    settings, config, sizes = plan.settings, plan.config, parameters(plan.config)
    table = Table(show_header=False, box=None, pad_edge=False)
    layers = f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"
    heads = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    weights = size(_target_bytes(settings, plan.target))
    table.add_row(
        "target", f"{settings.target}: {count(plan.target.parameters)} parameters, {weights}, none of it loaded"
    )
    table.add_row(
        "drafter", f"{layers}, {heads}: {count(sizes.trained)} parameters trained, {count(sizes.frozen)} frozen"
    )
    table.add_row("data", plan.rows.note)
    if settings.features.mode == "online":
        stored = "none: features.mode=online"
    elif plan.rows.counted:
        fits = _store_bytes(plan) <= settings.features.max_gigabytes * 1e9
        limit = f", more than features.max_gigabytes = {settings.features.max_gigabytes:g}: training asks first"
        stored = f"{size(_store_bytes(plan))} in {settings.features.directory}{'' if fits else limit}"
    else:
        stored = f"{size(_store_bytes(plan))} for each million tokens of rows"
    table.add_row("feature store", stored)
    return table


def _stages(plan: RunEstimate) -> Table:
    table = Table(title=f"A step of each stage, on {plan.launch.ranks} x {plan.launch.device}", title_justify="left")
    for heading in ("steps", "depth", "anchors", "predictions", "FLOPs", "seconds", "hours", "peak of a rank"):
        table.add_column(heading, justify="right")
    for cost in plan.costs:
        stage = cost.stage
        anchors = "all" if stage.anchors_per_row is None else str(stage.anchors_per_row)
        times = [f"{cost.seconds:.3g}", f"{cost.seconds * stage.steps / 3600:.2f}"]
        sums = [f"{cost.predictions:,.0f}", count(cost.flops)]
        table.add_row(str(stage.steps), str(stage.depth), anchors, *sums, *times, size(peak(cost.parts)))
    return table


def _memory(plan: RunEstimate) -> Table:
    most = max(plan.costs, key=lambda cost: peak(cost.parts))
    table = Table(
        title=f"Memory of a rank at its peak, depth {most.stage.depth}", title_justify="left", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    for part in filter(lambda part: part.size, most.parts):
        table.add_row(part.name, size(part.size))
    table.add_row(
        f"allocator, {SLACK - 1:.0%} of what comes and goes",
        size(peak(most.parts) - sum(part.size for part in most.parts)),
    )
    table.add_section()
    table.add_row("peak", size(peak(most.parts)))
    return table


def _conclusions(plan: RunEstimate) -> list[str]:
    settings, launch = plan.settings, plan.launch
    moved = moved_bytes(
        plan.config, launch.ranks, launch.sharding, settings.batch.rows_per_step, settings.data.row_length
    )
    exchanged = f", {size(moved.exchanged)} exchanged with other ranks" if launch.ranks > 1 else ""
    lines = [
        f"Bytes of a step and rank: {size(moved.features)} of features read, "
        f"{size(moved.optimizer)} through AdamW{exchanged}."
    ]
    rate = launch.ranks * plan.device.flops * launch.share
    hours = {"training": sum(cost.seconds * cost.stage.steps for cost in plan.costs) / 3600}
    measurements = -(-settings.total_steps // settings.heldout.every)
    hours[f"{measurements} held-out measurements"] = (
        measurements * _heldout_flops(plan) / (plan.device.flops * launch.share) / 3600
    )
    if settings.features.mode == "offline" and plan.rows.counted:
        tokens = len(plan.rows.rows) * settings.data.row_length
        hours["target features"] = 2 * plan.target.multiplied * tokens / rate / 3600
    listed = ", ".join(f"{name} {value:.2f}" for name, value in hours.items())
    where = f"{launch.ranks} x {launch.device} at {launch.share:.0%} of {count(plan.device.flops)}FLOP/s"
    lines.append(f"Expected hours on {where}: {sum(hours.values()):.2f} ({listed}).")
    making = _target_bytes(settings, plan.target) / (launch.ranks if settings.features.target == "sharded" else 1)
    largest = max(making, *(peak(cost.parts) for cost in plan.costs))
    if largest > plan.device.memory * USABLE:
        lines.append(
            f"Does not fit: {size(largest)} of {size(plan.device.memory)}. Less memory: loss.recompute=true, "
            "a smaller batch.rows_per_forward or data.row_length, fewer anchors_per_row, features.target=sharded "
            "beside features.mode=online, more ranks that share (recipes/accelerate)."
        )
    return lines


def _heldout_flops(plan: RunEstimate) -> float:
    """Of one measurement in one process, on rows like those of training: forwards for figures per depth; the replay
    takes as much again.
    """
    options = plan.settings.heldout
    deep = Stage(steps=1, depth=options.depth or 2 * options.lookahead, anchors_per_row=options.anchors_per_row)
    like = stage_forwards(plan.settings, deep, [turn_sizes(row) for row in plan.rows.rows[: options.max_rows]], 1)
    return (
        2
        * options.max_rows
        * sum(flops(products(plan.config, forward)) for forward in like)
        / 3
        / sum(forward.rows for forward in like)
    )
