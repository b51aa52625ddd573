"""Measure modes side by side: `python -m infer.evaluate --recipe R --modes ar,sd,ssd --prompts A.jsonl --num-prompts
24 ... --out DIR`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from drafters.base.errors import EXIT_INTERRUPTED, UserError, run_command
from drafters.base.settings import parse_overrides
from drafters.targets.template import TemplateOptions
from infer.config import BASELINE, EngineSettings, Mode
from infer.console import Interrupt, Parser, interruptible, loading, note, progress_bar
from infer.recipe import mode_named, read_recipe

if TYPE_CHECKING:
    from drafters.eagle3_ssd.speed import PairedTokens
    from drafters.targets.target import Target
    from infer.engine.engine import Engine
    from infer.engine.request import Request, SamplingParams
    from infer.evaluation.baseline import TransformersEngine
    from infer.evaluation.results import Measured

log = logging.getLogger(__name__)

DESCRIPTION = """\
Measure how fast a target answers alone (ar), with synchronous speculation (sd) and with SSD (ssd), and why.

The modes take turns prompt by prompt in one process, so that noise hits all alike; a warm-up is not counted.
Writes DIR/results.json, DIR/report.html and DIR/plots/. Ctrl-C (or SIGTERM) keeps the prompts that every mode has answered."""
EXAMPLES = """\
  python -m infer.evaluate --recipe recipes/smollm2-135m/evaluate.yaml --prompts data/prompts/*.jsonl --num-prompts 24 --out runs/evaluate
  each mode at its own best lookahead, and ar on two cores beside them:
  python -m infer.evaluate --recipe R --prompts P.jsonl --out DIR --set sd:lookahead=2 --set ssd:lookahead=5 \\
      --beside "ar target_threads=2 target_devices=[cpu:0,cpu:1]\""""
WARM_UP = [{"role": "user", "content": "Say hello and tell me in one sentence what you can do."}]
WARM_UP_TOKENS = 16


class Run(NamedTuple):
    """One thing to measure. The label is the mode, with the settings behind it for a run that stands beside the
    compared ones.
    """

    label: str
    mode: Mode
    settings: EngineSettings


class Question(NamedTuple):
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    runs = plan_runs(options)
    from data.prompts import read_prompts
    from drafters.targets.target import load_target
    from infer.devices import device_of
    from infer.engine.request import SamplingParams

    prompts = read_prompts(options.prompts, options.num_prompts)
    params = SamplingParams(options.max_new_tokens, options.temperature, seed=options.seed)
    out = make_directory(options.out)
    with loading(f"loading {runs[0].settings.target} ..."):
        device = str(device_of(runs[0].settings.target_devices))
        target = load_target(runs[0].settings.target, runs[0].settings.dtype, device)
    max_model_len = min(run.settings.max_model_len for run in runs)
    questions = render_questions(prompts, target, runs[0].settings.template, max_model_len, params.max_new_tokens)
    with interruptible() as interrupt:
        measured = measure_all(runs, target, questions, params, interrupt)
        if not measured[0].answers:
            print("interrupted before every mode had answered a prompt: nothing is written", file=sys.stderr)
            return EXIT_INTERRUPTED
        paired = {} if options.temperature else replay_hits(measured, target, interrupt)
        results = finish(measured, paired, target, options, out)
    print_table(results)
    print(f"written: {out / 'results.json'}, {out / 'report.html'}")
    return EXIT_INTERRUPTED if interrupt else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `overrides` are the `key=value` settings."""
    parser = Parser("python -m infer.evaluate", DESCRIPTION, EXAMPLES)
    parser.add_recipe()
    parser.add_argument(
        "--modes", default="ar,sd,ssd", metavar="M,M", help="the modes to compare (default: ar,sd,ssd)"
    )
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="FILE", help=".jsonl files with 'messages' or 'prompt' rows"
    )
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="how many, an even mix of the files (default: all)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="M", help="longest answer, in tokens (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 always takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the sampling, where there is a temperature (default: 0)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="instead of the recipe's; in float32 the modes agree to the token",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the results, made where it is missing"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="MODE:key=value", help="a setting of one mode only; repeatable"
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar='"MODE key=value"',
        help="measure a mode once more with other settings; repeatable",
    )
    parser.add_argument(
        "--baseline", action="store_true", help="let transformers' own generate answer too, same weights and threads"
    )
    options = parser.read(argv)
    settings = [
        name for name in options.prompts if "=" in name and not Path(name).exists()
    ]  # --prompts takes all that follows it
    options.overrides += settings
    options.prompts = [name for name in options.prompts if name not in settings]
    return options


def plan_runs(options: argparse.Namespace) -> list[Run]:
    """What to measure. A setting comes from the recipe, its `modes:` part, key=value, `--set`, `--beside`: the later
    one wins.
    """
    recipe = read_recipe(options.recipe)
    common = parse_overrides(options.overrides)
    if options.dtype is not None:
        common["dtype"] = options.dtype
    only = _only_for(options.set)
    modes = [mode_named(name, "--modes") for name in options.modes.split(",")]
    if len(set(modes)) < len(modes):
        raise UserError(
            f"--modes {options.modes}: a mode stands there twice; --beside measures one again with other settings"
        )
    runs = []
    baseline = [(BASELINE, Mode.AR, {})] if options.baseline else []
    for label, mode, extra in (
        [(mode.value, mode, {}) for mode in modes] + [_beside(text) for text in options.beside] + baseline
    ):
        settings = recipe.settings(mode, {**common, **only.get(mode, {}), **extra, "batch_size": 1})
        if mode is not Mode.AR and settings.drafter is None:
            raise UserError(
                f"{options.recipe}: mode {mode} needs a drafter; add `drafter: DIRECTORY` or give drafter=DIRECTORY"
            )
        runs.append(Run(label, mode, settings))
    _check_one_target(runs)
    return runs


def render_questions(
    prompts: Sequence[Any], target: Target, template: TemplateOptions, max_model_len: int, max_new_tokens: int
) -> list[Question]:
    """All prompts in the target's template. Raises `UserError` for one that leaves no room for an answer, before
    anything is measured.
    """
    from data.chat.render import render_prompt

    questions = [Question(prompt.id, render_prompt(prompt.messages, target.tokenizer, template)) for prompt in prompts]
    for question in questions:
        if len(question.token_ids) >= max_model_len:
            length = len(question.token_ids)
            raise UserError(
                f"prompt {question.id!r} has {length} tokens, max_model_len = {max_model_len}: leave it out or raise max_model_len"
            )
    cut = sum(len(question.token_ids) + max_new_tokens > max_model_len for question in questions)
    if cut:
        log.warning(
            "%d of %d answers may end at max_model_len = %d before --max-new-tokens",
            cut,
            len(questions),
            max_model_len,
        )
    return questions


def measure_all(
    runs: Sequence[Run], target: Target, questions: Sequence[Question], params: SamplingParams, interrupt: Interrupt
) -> list[Measured]:
    """Launch one engine for each run on the same target, warm them up, and let them answer all questions in turns."""
    from data.chat.render import render_prompt
    from infer.evaluation.results import Measured

    measured = [Measured(run.label, run.mode, run.settings, [], []) for run in runs]
    with ExitStack() as stack:
        with loading("starting the engines ..."):
            engines = [stack.enter_context(_engine(run, target)) for run in runs]
            warm_up = render_prompt(WARM_UP, target.tokenizer)
            for engine in engines:
                answer(engine, warm_up, type(params)(WARM_UP_TOKENS), interrupt)
        with progress_bar() as bar:
            task = bar.add_task("prompts x modes", total=len(questions) * len(runs))
            measure(engines, measured, questions, params, interrupt, lambda: bar.advance(task))
        for run, engine in zip(runs, engines, strict=True):
            if engine.draft_failures:
                log.warning("%s: the draft process died on the way: these are not the figures of ssd", run.label)
    return measured


def _engine(run: Run, target: Target) -> Engine | TransformersEngine:
    from infer.evaluation.baseline import TransformersEngine
    from infer.launch import launch

    return (
        TransformersEngine(run.settings, str(target.device))
        if run.label == BASELINE
        else launch(run.settings, run.mode, target)
    )


def measure(
    engines: Sequence[Engine | TransformersEngine],
    measured: Sequence[Measured],
    questions: Sequence[Question],
    params: SamplingParams,
    interrupt: Interrupt,
    advance: Callable[[], None],
) -> None:
    """Every engine answers every question, one at a time; who goes first rotates. A question that Ctrl-C cut short is
    left out for all.
    """
    for number, question in enumerate(questions):
        turn: dict[int, Request | None] = {}
        for place in range(len(engines)):
            index = (number + place) % len(engines)
            turn[index] = answer(engines[index], question.token_ids, params, interrupt)
            advance()
        if None in turn.values():
            return
        for index, request in turn.items():
            assert request is not None
            measured[index].prompt_ids.append(question.id)
            measured[index].answers.append(request)


def answer(
    engine: Engine | TransformersEngine, prompt_ids: Sequence[int], params: SamplingParams, interrupt: Interrupt
) -> Request | None:
    """The finished request, or None where Ctrl-C came first. The process takes on the engine's cores and threads
    before.
    """
    import torch

    from infer.devices import pin_to_cores

    pin_to_cores(engine.settings.target_devices)
    torch.set_num_threads(engine.settings.target_threads)
    request_id = engine.submit(prompt_ids, params)
    while not interrupt:
        for output in engine.step():
            if output.finish_reason is not None:
                return output.request
    engine.cancel(request_id)
    return None


def replay_hits(measured: Sequence[Measured], target: Target, interrupt: Interrupt) -> dict[str, list[PairedTokens]]:
    """What retention is made of, by label of the SSD runs. Ctrl-C leaves it out: what was measured is worth more than
    the rest of it.
    """
    from infer.evaluation.retention import paired_tokens

    runs = [run for run in measured if run.mode is Mode.SSD]
    paired: dict[str, list[PairedTokens]] = {run.label: [] for run in runs}
    with progress_bar() as bar:
        task = bar.add_task(
            "answers replayed with fresh features", total=sum(len(run.answers) for run in runs), visible=bool(runs)
        )
        for run in runs:
            pairs = paired_tokens(run.answers, run.settings, target)
            while not interrupt and (pair := next(pairs, None)) is not None:
                paired[run.label].append(pair)
                bar.advance(task)
    if interrupt and runs:
        note("interrupted: retention is left out")
    return {} if interrupt else paired


def finish(
    measured: Sequence[Measured],
    paired: Mapping[str, Sequence[PairedTokens]],
    target: Target,
    options: argparse.Namespace,
    out: Path,
) -> dict[str, Any]:
    """Write `results.json`, the plots and the report; returns the results."""
    from infer.evaluation.results import build_results, write_json
    from infer.report import write_report

    arguments = {
        "prompts": [str(path) for path in options.prompts],
        "num_prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    results = build_results(measured, target, arguments, paired)
    write_json(out / "results.json", results)
    write_report(results, out)
    return results


def print_table(results: Mapping[str, Any]) -> None:
    """The figures of each run, and the ratios, on stdout."""
    table = Table(title=f"{results['target']['name']}, {results['runs'][0]['prompts']} prompts", title_justify="left")
    for name in ("mode", "tokens/s", "tokens/round", "hit rate", "verify ms", "wait ms"):
        is_label = (
            name == "mode"
        )  # as long as what --beside was given: it takes several lines, the figures keep theirs
        table.add_column(name, justify="left" if is_label else "right", overflow="fold", no_wrap=not is_label)
    for run in results["runs"]:
        rate = "" if run["hit_rate"] is None else f"{run['hit_rate']:.0%}"
        middle = [(run[name] or {}).get("p50") for name in ("verify_ms", "wait_ms")]
        numbers = [_number(run["tokens_per_second"], 1), _number(run["tokens_per_round"], 2), rate]
        table.add_row(run["label"], *numbers, *(_number(value, 1) for value in middle))
    console = Console(highlight=False, markup=False)  # a label may hold brackets: target_devices=[cpu:0]
    console.print(table)
    for name, interval in results["ratio_intervals"].items():
        if interval:
            console.print(
                f"{name}: {interval['value']:.2f} (95 % interval {interval['low']:.2f} to {interval['high']:.2f})"
            )
    for run in results["runs"]:
        if kept := run["retention"]:
            console.print(
                f"retention of {run['label']}: {kept['value']:.3f} (95 % interval {kept['low']:.3f} to {kept['high']:.3f})"
            )
    for pair in results["agreement"]:
        console.print(f"same tokens {pair['pair']}: {pair['equal']} of {pair['prompts']} prompts")


def make_directory(name: str) -> Path:
    """The output directory, made where it is missing."""
    out = Path(name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {name}: cannot make that directory ({error.strerror}): give one that can be written"
        ) from error
    return out


def _only_for(pairs: Sequence[str]) -> dict[Mode, dict[str, Any]]:
    settings: dict[Mode, dict[str, Any]] = {}
    for pair in pairs:
        name, colon, override = pair.partition(":")
        if not colon:
            raise UserError(f"cannot read --set {pair}: write it as MODE:key=value, for example sd:lookahead=2")
        settings.setdefault(mode_named(name, "--set"), {}).update(parse_overrides([override]))
    return settings


def _beside(text: str) -> tuple[str, Mode, dict[str, Any]]:
    name, *pairs = text.split()
    if not pairs:
        raise UserError(f'--beside "{text}": give the mode and what differs, for example "ar target_threads=2"')
    return text, mode_named(name, "--beside"), parse_overrides(pairs)


def _check_one_target(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        for name in ("target", "dtype"):
            if getattr(run.settings, name) != getattr(runs[0].settings, name):
                raise UserError(
                    f"{run.label}: {name} differs between the runs; all share one loaded target: measure it in a run of its own"
                )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(run_command(main))
