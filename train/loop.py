"""The training loop: the same code in one process and in several, on CPU and on a GPU."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from drafters.eagle3_ssd.card import DrafterCard
from drafters.eagle3_ssd.checkpoint import save_drafter
from drafters.errors import UserError
from drafters.targets import DTYPES
from train.config import Stage, TrainSettings
from train.console import Console
from train.features import Features
from train.heldout import Figures, measure
from train.losses import depth_weights, loss_scales
from train.metrics import Metrics
from train.objective import Anchors, Objective, choose_anchors, count
from train.prepare import Prepared
from train.state import Progress, StopRequest, complete_states, load_state, save_state

BEST, FINAL = "best-eagle3", "final-eagle3"


class Run(NamedTuple):
    """What stays the same from the first step to the last."""

    settings: TrainSettings
    prepared: Prepared
    console: Console
    accelerator: Accelerator
    objective: Objective  # the plain module; `model` wraps it for several processes
    model: nn.Module
    optimizer: Any
    metrics: Metrics

    @property
    def output(self) -> Path:
        """The run's directory."""
        return Path(self.settings.output)


def train(settings: TrainSettings, prepared: Prepared, console: Console) -> Path:
    """Train to the end of the curriculum, from the newest state if there is one. Returns the drafter's directory."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    console.speaks = accelerator.is_main_process
    check_batch(settings, accelerator.num_processes)
    console.say(f"training in {accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}")
    objective = make_objective(settings, prepared).to(accelerator.device)
    optimizer = make_optimizer(settings, objective)
    progress = resume(Path(settings.output), objective, optimizer, prepared.key, console)
    model, stepper = accelerator.prepare(objective, optimizer)
    metrics = Metrics(settings, Path(settings.output), accelerator.is_main_process)
    run = Run(settings, prepared, console, accelerator, objective, model, stepper, metrics)
    deadline = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    figures: Figures | None = None
    with StopRequest() as stop:
        while progress.step < settings.total_steps:
            result = train_step(run, progress.step, stop.received or time.monotonic() > deadline)
            progress = progress._replace(step=progress.step + 1)
            is_last = result.stops or progress.step == settings.total_steps
            if result.stops:  # at once: who sent the signal may not wait for the held-out figures
                save(run, progress)
            if is_last or progress.step % settings.heldout.every == 0:
                progress, figures = evaluate(run, progress)
            if is_last or progress.step % settings.checkpoint.every == 0:
                save(run, progress)
            if result.stops:
                console.say(f"stopped after step {progress.step} of {settings.total_steps}; the same command goes on from here")
                break
    finish(run, progress, figures)
    return run.output / FINAL


def save(run: Run, progress: Progress) -> None:
    """Write the training state, in the first process."""
    if run.accelerator.is_main_process:
        keep = run.settings.checkpoint.keep
        save_state(run.output / "states", run.objective.drafter, run.optimizer, progress, run.prepared.key, keep)


def evaluate(run: Run, progress: Progress) -> tuple[Progress, Figures | None]:
    """Measure on held-out data in the first process, keep the best drafter; the others wait."""
    figures = None
    if run.accelerator.is_main_process:
        figures = measure(
            run.objective, run.prepared.start.vocab, run.prepared.heldout, run.settings.heldout, run.settings.batch.rows_per_forward
        )
        run.metrics.write({"step": progress.step, "heldout": figures.values})
        run.console.say(_heldout_line(progress.step, figures))
        if figures.speed > progress.best:
            progress = progress._replace(best=figures.speed)
            write_drafter(run, BEST, progress.step, figures)
    run.accelerator.wait_for_everyone()
    return progress, figures


def finish(run: Run, progress: Progress, figures: Figures | None) -> None:
    """Write the last drafter, unless nothing was done, and close what is open."""
    run.console.close()
    if figures is not None:
        write_drafter(run, FINAL, progress.step, figures)
        run.console.say(f"drafters written: {run.output / BEST} (best predicted speed) and {run.output / FINAL}")
    elif run.accelerator.is_main_process:
        run.console.say(f"{run.output} has all {progress.step} steps; raise the curriculum's steps to train on")
    run.metrics.close()
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


class StepResult(NamedTuple):
    """Numbers of one optimizer step, and whether anybody asked to stop."""

    values: dict[str, Any]
    stops: bool


def train_step(run: Run, step: int, wants_stop: bool) -> StepResult:
    """One optimizer step over `rows_per_step` rows, shared among the processes and cut into forwards of `rows_per_forward`."""
    started = time.monotonic()
    settings, accelerator = run.settings, run.accelerator
    stage = settings.stage_at(step)
    batches = step_batches(settings, run.prepared, stage, step, accelerator)
    counts = [count(batch.features, batch.anchors, stage.depth) for batch in batches]
    flag = torch.tensor([float(wants_stop)], dtype=torch.float64, device=accelerator.device)
    local = torch.stack([torch.cat((sum_of([c.all for c in counts]), flag)), torch.cat((sum_of([c.sampled for c in counts]), flag))])
    reduced: Any = accelerator.reduce(local, "sum")
    there_are, computed = reduced[0, :-1].tolist(), reduced[1, :-1].tolist()
    scales = loss_scales(depth_weights(settings.loss.depth_weights, stage.depth + 1, settings.loss.gamma), there_are, computed)
    scales = [scale * accelerator.num_processes for scale in scales]  # the gradients of the processes are averaged
    losses, sums = [], []
    for number, batch in enumerate(batches):
        is_last = number + 1 == len(batches)
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            loss, part = run.model(batch.features, batch.anchors, stage.depth, scales)
            accelerator.backward(loss)
        losses.append(loss.detach())
        sums.append(part)
    lr = learning_rate(settings, step)
    norm = update(run, lr)
    loss = torch.stack(losses).sum() / accelerator.num_processes
    totals: Any = accelerator.reduce(torch.cat((loss[None], sum_of(sums).flatten())), "sum")
    values = _step_values(totals.tolist(), computed, stage)
    tokens = sum(int((batch.features.document_ids > 0).sum()) for batch in batches) * accelerator.num_processes
    seconds = time.monotonic() - started
    values.update(depth=stage.depth, lr=lr, grad_norm=norm, predictions=int(sum(computed)), tokens_per_second=tokens / seconds)
    run.metrics.write({"step": step + 1, **values})
    note = f"depth {stage.depth} loss {values['loss']:.3f} top-1 {values['accuracy'][0]:.2f} .. {values['accuracy'][-1]:.2f}"
    run.console.show("training", step + 1, settings.total_steps, note)
    return StepResult(values, bool(reduced[0, -1] > 0))


def update(run: Run, lr: float) -> float:
    """Clip the gradient, take an AdamW step at `lr`, and return the gradient's norm before clipping."""
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.settings.optimizer.clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return float(norm) if norm is not None else math.nan


class MicroBatch(NamedTuple):
    """What one forward reads."""

    features: Features
    anchors: Anchors


def step_batches(settings: TrainSettings, prepared: Prepared, stage: Stage, step: int, accelerator: Accelerator) -> list[MicroBatch]:
    """This process's part of the rows of one step, with anchors. A row's anchors depend on its place in the step alone."""
    rows = rows_of_step(step, settings.batch.rows_per_step, len(prepared.training), settings.seed)
    places = range(accelerator.process_index, len(rows), accelerator.num_processes)
    result = []
    for first in range(0, len(places), settings.batch.rows_per_forward):
        mine = places[first : first + settings.batch.rows_per_forward]
        features = Features(*(x.to(accelerator.device) for x in prepared.training.batch([rows[place] for place in mine])))
        keys = [f"{settings.seed} {step} {place}" for place in mine]
        result.append(MicroBatch(features, choose_anchors(features, stage.anchors_per_row, keys)))
    return result


def rows_of_step(step: int, rows_per_step: int, num_rows: int, seed: int) -> list[int]:
    """The rows of a step: the epochs' permutations, one after another, in parts of `rows_per_step`."""
    places = range(step * rows_per_step, (step + 1) * rows_per_step)
    return [_permutation(place // num_rows, num_rows, seed)[place % num_rows] for place in places]


@lru_cache(maxsize=2)
def _permutation(epoch: int, num_rows: int, seed: int) -> list[int]:
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up to `lr`, then a cosine down to `final_lr_ratio * lr` at the last step."""
    options = settings.optimizer
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, settings.total_steps - 1 - options.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return options.lr * (options.final_lr_ratio + (1 - options.final_lr_ratio) * cosine)


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Elementwise sum of equal shapes."""
    return torch.stack(list(tensors)).sum(0)


def check_batch(settings: TrainSettings, num_processes: int) -> None:
    """Refuse a batch that the processes cannot share equally: each takes the same number of rows in the same number of forwards."""
    if settings.batch.rows_per_step % num_processes:
        raise UserError(
            f"batch.rows_per_step = {settings.batch.rows_per_step} cannot be shared by {num_processes} processes; take a multiple of it"
        )


def make_objective(settings: TrainSettings, prepared: Prepared) -> Objective:
    """The module that is trained."""
    head = prepared.target.lm_head_weight[prepared.start.vocab.draft_to_target].clone()
    return Objective(prepared.start.drafter, head, settings.loss, DTYPES[settings.dtype])


def make_optimizer(settings: TrainSettings, objective: Objective) -> torch.optim.AdamW:
    """AdamW over fp32 masters; norms are not decayed."""
    options = settings.optimizer
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


def resume(output: Path, objective: Objective, optimizer: torch.optim.Optimizer, key: str, console: Console) -> Progress:
    """Load the newest complete state, or start at step 0."""
    states = complete_states(output / "states")
    if not states:
        return Progress()
    progress = load_state(states[-1], objective.drafter, optimizer, key)
    console.say(f"going on from {states[-1]}")
    return progress


def write_drafter(run: Run, name: str, step: int, figures: Figures) -> None:
    """The canonical directory `name`, with a card that says what was done."""
    settings, prepared = run.settings, run.prepared
    facts = prepared.target.facts
    stages = [settings.stage_at(done) for done in range(step)]
    card = DrafterCard(
        target=facts.name,
        target_weight_hash=facts.weight_hash,
        tokenizer_hash=facts.tokenizer_hash,
        template_hash=facts.template_hash,
        commit=_commit(),
        data=prepared.data,
        training={"steps": step, **settings.model_dump(mode="json", exclude={"wandb", "output", "features"})},
        heldout=figures.values,
        lookahead=settings.heldout.lookahead,
        trained_depth=max(stage.depth for stage in stages) + 1,
        trained_length=settings.data.row_length,
        law=figures.law,
        measured_fresh=figures.fresh,
        measured_lagged=figures.lagged,
    )
    save_drafter(run.output / name, run.objective.drafter, prepared.start.vocab, card)


def _step_values(totals: list[float], computed: list[float], stage: Stage) -> dict[str, Any]:
    """The loss, and per depth the averages of kl, acceptance and argmax hits."""
    values: dict[str, Any] = {"loss": totals[0], "kl": [], "acceptance": [], "accuracy": []}
    for depth in range(stage.depth + 1):
        kl, rejection, correct = totals[1 + 3 * depth : 4 + 3 * depth]
        number = max(1.0, computed[depth])
        values["kl"].append(kl / number)
        values["acceptance"].append(1 - rejection / number)
        values["accuracy"].append(correct / number)
    return values


def _heldout_line(step: int, figures: Figures) -> str:
    values = figures.values
    accuracy = " ".join(f"{a:.3f}" for a in values["accuracy"])
    parts = [f"budget {e['budget']}: hit {e['hit_rate']:.2f} tau {e['tau']:.2f} ret {e['retention']:.2f}" for e in values["lagged"]]
    return f"held-out {step}: tau fresh {values['tau_fresh']:.2f}, {'; '.join(parts)}, speed {figures.speed:.2f}; top-1 by depth {accuracy}"


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None
