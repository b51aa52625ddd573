"""The training loop: the same code in one process and in several, on CPU and on a GPU."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from train.config import TrainSettings
from train.console import Console
from train.export import write_drafter
from train.heldout import Figures, measure
from train.metrics import Metrics
from train.prepare import Prepared
from train.report import write_report
from train.run import Run, check_batch, make_objective, make_optimizer, resume
from train.state import Progress, StopRequest, save_state
from train.step import train_step
from train.throughput import Meter

BEST, FINAL = "best-eagle3", "final-eagle3"


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
    metrics = Metrics(settings, Path(settings.output), accelerator.is_main_process, console.say)
    meter = Meter(objective.drafter.config, settings.curriculum, accelerator.device, objective.dtype)
    run = Run(settings, prepared, console, accelerator, objective, model, stepper, metrics, meter)
    deadline = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    figures: Figures | None = None
    with StopRequest() as stop:
        while progress.step < settings.total_steps:
            result = train_step(run, progress, stop.received or time.monotonic() > deadline)
            progress = progress._replace(step=progress.step + 1, tally=result.tally)
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
    if run.accelerator.is_main_process:
        run.console.say(f"report: {write_report(run.output)}")
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def _heldout_line(step: int, figures: Figures) -> str:
    values = figures.values
    accuracy = " ".join(f"{a:.3f}" for a in values["accuracy"])
    parts = [f"budget {e['budget']}: hit {e['hit_rate']:.2f} tau {e['tau']:.2f} ret {e['retention']:.2f}" for e in values["lagged"]]
    return f"held-out {step}: tau fresh {values['tau_fresh']:.2f}, {'; '.join(parts)}, speed {figures.speed:.2f}; top-1 by depth {accuracy}"
