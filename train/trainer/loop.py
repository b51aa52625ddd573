"""The training loop: steps, measurements on held-out data, states; the same code under every parallel strategy."""

from __future__ import annotations

import math
import time
from pathlib import Path

from accelerate import Accelerator

from train.config import TrainSettings
from train.costs.throughput import Meter
from train.monitor.console import Console
from train.monitor.metrics import METRICS_FILE, Metrics, keep_until
from train.objective.objective import Objective
from train.parallel.launch import agreed, start_accelerator
from train.parallel.strategy import load_weights, share
from train.report import write_report
from train.trainer.export import write_drafter
from train.trainer.prepare import TrainingSetup
from train.trainer.run import Run, check_batch, make_objective, parallel_strategy
from train.trainer.state import Progress, StopRequest, newest_state, save_state
from train.trainer.step import train_step
from train.validation.heldout import HeldoutFigures, measure, step_costs

BEST, FINAL = "best-eagle3", "final-eagle3"


def train(
    settings: TrainSettings, setup: TrainingSetup, console: Console, accelerator: Accelerator | None = None
) -> Path:
    """Train to the end of the curriculum, from the newest state if there is one. Returns the drafter's directory.

    `accelerator` where the processes know of each other already.
    """
    run, progress = open_run(settings, setup, console, accelerator or start_accelerator())
    deadline = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    total, is_new = settings.total_steps, False
    if agreed(progress.step == total and not (run.output / FINAL).is_dir()):  # killed after the last step
        evaluate(run, progress, is_last=True)
    with StopRequest() as stop:
        while progress.step < total and not has_stalled(settings, progress):
            result = train_step(run, progress, stop.received, time.monotonic() > deadline)
            progress, is_new = progress._replace(step=progress.step + 1, tally=result.tally), True
            if result.interrupted:  # whoever sent the signal does not wait for held-out figures
                save(run, progress)
                console.say(
                    f"stopped after step {progress.step} of {total}, state saved; the same command goes on from here"
                )
                break
            is_last = result.out_of_time or progress.step == total
            if is_last or progress.step % settings.heldout.every == 0:
                progress = evaluate(run, progress, is_last)
                is_last = is_last or has_stalled(settings, progress)
            if is_last or progress.step % settings.checkpoint.every == 0:
                save(run, progress)
            if is_last:
                break
    if not is_new:
        more = "raise the curriculum's steps" if progress.step == total else "raise heldout.patience"
        console.say(f"{run.output} is trained, with {progress.step} steps; {more} to train on")
    close_run(run)
    return run.output / FINAL


def open_run(
    settings: TrainSettings, setup: TrainingSetup, console: Console, accelerator: Accelerator
) -> tuple[Run, Progress]:
    """Take up the newest state and wrap the module."""
    console.speaks = accelerator.is_main_process
    check_batch(settings, accelerator.num_processes)
    console.say(f"training in {accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}")
    output = Path(settings.output)
    found = newest_state(output / "states", setup.key, console.say) if accelerator.is_main_process else None
    saved = share(found, accelerator)
    objective = make_objective(settings, setup)
    if saved is not None:
        load_weights(objective.drafter, saved.state)
    strategy = parallel_strategy(accelerator, objective.to(accelerator.device), settings)
    if saved is not None:
        strategy.restore(saved.state)
    progress = Progress() if saved is None else saved.progress
    if accelerator.is_main_process:
        keep_until(output / METRICS_FILE, progress.step)
    metrics = Metrics(settings, output, accelerator.is_main_process, console.say)
    meter = Meter(objective.drafter.config, settings.curriculum, settings.serving, accelerator.device, objective.dtype)
    return Run(settings, setup, console, accelerator, objective, strategy, metrics, meter), progress


def save(run: Run, progress: Progress) -> None:
    """Gather the training state and write it, in the first process."""
    state = run.strategy.state()
    if state is not None:
        save_state(run.output / "states", state, progress, run.setup.key, run.settings.checkpoint.keep)


def evaluate(run: Run, progress: Progress, is_last: bool) -> Progress:
    """Measure on held-out data in the first process, keep the best drafter and the last one; the others wait, and
    learn how it went.
    """
    drafter = run.strategy.whole_drafter()
    progress = progress._replace(measured_since=progress.measured_since + 1)
    if drafter is not None:
        settings, setup = run.settings, run.setup
        own = run.objective
        whole = Objective(drafter, own.target_head, own.draft_to_target, own.settings, own.dtype)
        costs = step_costs(settings.heldout, drafter, setup.target)
        figures = measure(
            whole, setup.start.vocab, setup.heldout, settings.heldout, settings.batch.rows_per_forward, costs
        )
        run.metrics.write({"step": progress.step, "heldout": figures.values})
        run.console.say(_heldout_line(progress.step, figures))
        if figures.speed > progress.best:
            progress = progress._replace(best=figures.speed, measured_since=0)
            write_drafter(run, BEST, drafter, progress.step, figures)
        if has_stalled(settings, progress):
            run.console.say(
                f"no better predicted speed in {progress.measured_since} measurements: "
                "training ends (heldout.patience)"
            )
        if is_last or has_stalled(settings, progress):
            write_drafter(run, FINAL, drafter, progress.step, figures)
            run.console.say(f"drafters written: {run.output / BEST} (best predicted speed) and {run.output / FINAL}")
    return agreed(progress)


def has_stalled(settings: TrainSettings, progress: Progress) -> bool:
    """Whether `heldout.patience` asks to stop."""
    patience = settings.heldout.patience
    return patience is not None and progress.measured_since >= patience


def close_run(run: Run) -> None:
    """Close what is open."""
    run.console.close()
    run.metrics.close()
    if run.accelerator.is_main_process:
        run.console.say(f"report: {write_report(run.output)}")
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def _heldout_line(step: int, figures: HeldoutFigures) -> str:
    values = figures.values
    accuracy = " ".join(f"{a:.3f}" for a in values["accuracy"])
    parts = [
        f"budget {e['budget']}: hit {e['hit_rate']:.2f} tau {e['tau']:.2f} ret {e['retention'] or 0:.2f}"
        for e in values["lagged"]
    ]
    return (
        f"held-out {step}: tau fresh {values['tau_fresh']:.2f}, {'; '.join(parts)}, "
        f"speed {figures.speed:.2f}; top-1 by depth {accuracy}"
    )
