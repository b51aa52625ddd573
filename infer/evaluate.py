"""Measure modes side by side: `python -m infer.evaluate --recipe R --modes ar,sd,ssd --prompts A.jsonl --out DIR`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafters.base.errors import EXIT_INTERRUPTED, UserError, run_command
from drafters.base.progress import ProgressDisplay
from drafters.targets.template import TemplateOptions
from infer.config import BASELINE, Mode
from infer.console import Interrupt, Parser, interruptible, loading, make_directory, note, stderr
from infer.evaluation.runs import Run, plan_runs
from infer.evaluation.table import print_table
from infer.tracing.profiler import profiling
from infer.tracing.spans import recording, span

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
Writes DIR/results.json, DIR/report.html and DIR/plots/.
Ctrl-C (or SIGTERM) keeps the prompts that every mode has answered."""
EXAMPLES = """\
  python -m infer.evaluate --recipe recipes/smollm2-135m/evaluate.yaml --prompts data/prompts/*.jsonl \\
      --num-prompts 24 --out runs/evaluate
  each mode at its own best lookahead, and ar on two cores beside them:
  python -m infer.evaluate --recipe R --prompts P.jsonl --out DIR --set sd:lookahead=2 --set ssd:lookahead=5 \\
      --beside "ar target_threads=2 target_devices=[cpu:0,cpu:1]\""""
WARM_UP = [{"role": "user", "content": "Say hello and tell me in one sentence what you can do."}]
WARM_UP_TOKENS = 16


class TokenizedPrompt(NamedTuple):
    """A prompt in the target's chat template, as token ids."""

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
    out = make_directory("--out", options.out)
    profile = make_directory("--profile", options.profile) if options.profile else None
    with loading(f"loading {runs[0].settings.target} ..."):
        device = str(device_of(runs[0].settings.target_devices))
        target = load_target(runs[0].settings.target, runs[0].settings.dtype, device)
    max_model_len = min(run.settings.max_model_len for run in runs)
    rendered = render_prompts(prompts, target, runs[0].settings.template, max_model_len, params.max_new_tokens)
    with interruptible() as interrupt:
        with recording(options.trace):
            measured = measure_all(runs, target, rendered, params, interrupt, profile)
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
    parser.add_tracing()
    options = parser.read(argv)
    # --prompts takes all that follows it, settings too
    settings = [name for name in options.prompts if "=" in name and not Path(name).exists()]
    options.overrides += settings
    options.prompts = [name for name in options.prompts if name not in settings]
    return options


def render_prompts(
    prompts: Sequence[Any], target: Target, template: TemplateOptions, max_model_len: int, max_new_tokens: int
) -> list[TokenizedPrompt]:
    """All prompts in the target's template. Raises `UserError` for one that leaves no room for an answer, before
    anything is measured.
    """
    from data.chat.render import render_prompt

    rendered = [
        TokenizedPrompt(prompt.id, render_prompt(prompt.messages, target.tokenizer, template)) for prompt in prompts
    ]
    for prompt in rendered:
        if len(prompt.token_ids) >= max_model_len:
            raise UserError(
                f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens, max_model_len = {max_model_len}: "
                "leave it out or raise max_model_len"
            )
    cut = sum(len(prompt.token_ids) + max_new_tokens > max_model_len for prompt in rendered)
    if cut:
        text = "%d of %d answers may end at max_model_len = %d before --max-new-tokens"
        log.warning(text, cut, len(rendered), max_model_len)
    return rendered


def measure_all(
    runs: Sequence[Run],
    target: Target,
    prompts: Sequence[TokenizedPrompt],
    params: SamplingParams,
    interrupt: Interrupt,
    profile: Path | None = None,
) -> list[Measured]:
    """Launch one engine for each run on the same target, warm them up, and let them answer all prompts in turns.

    `profile` is the directory of torch's profile of the answers.
    """
    from data.chat.render import render_prompt
    from infer.evaluation.results import Measured

    measured = [Measured(run.label, run.mode, run.settings, [], []) for run in runs]
    with ExitStack() as stack:
        with loading("starting the engines ..."):
            engines = [stack.enter_context(_engine(run, target)) for run in runs]
            warm_up = render_prompt(WARM_UP, target.tokenizer)
            for engine in engines:
                answer(engine, warm_up, type(params)(WARM_UP_TOKENS), interrupt)
        total = len(prompts) * len(runs)
        with ProgressDisplay("prompts x modes", total, console=stderr) as display, profiling(profile):
            measure(engines, measured, prompts, params, interrupt, display.advance)
        for run, engine in zip(runs, engines, strict=True):
            if engine.draft_failures:
                log.warning("%s: the draft process died on the way: these are not the figures of ssd", run.label)
    return measured


def _engine(run: Run, target: Target) -> Engine | TransformersEngine:
    from infer.evaluation.baseline import TransformersEngine
    from infer.launch import launch

    if run.label == BASELINE:
        return TransformersEngine(run.settings, str(target.device))
    return launch(run.settings, run.mode, target)


def measure(
    engines: Sequence[Engine | TransformersEngine],
    measured: Sequence[Measured],
    prompts: Sequence[TokenizedPrompt],
    params: SamplingParams,
    interrupt: Interrupt,
    advance: Callable[[], None],
) -> None:
    """Every engine answers every prompt, one at a time; the engine that goes first rotates. A prompt that Ctrl-C cut
    short is left out for all.
    """
    for number, prompt in enumerate(prompts):
        answered: dict[int, Request | None] = {}
        for place in range(len(engines)):
            index = (number + place) % len(engines)
            with span("answer") as traced:
                traced.note(run=measured[index].label, prompt=prompt.id)
                answered[index] = answer(engines[index], prompt.token_ids, params, interrupt)
            log.info("%s: prompt %r answered", measured[index].label, prompt.id)
            advance()
        if None in answered.values():
            return
        for index, request in answered.items():
            assert request is not None
            measured[index].prompt_ids.append(prompt.id)
            measured[index].answers.append(request)


def answer(
    engine: Engine | TransformersEngine, prompt_ids: Sequence[int], params: SamplingParams, interrupt: Interrupt
) -> Request | None:
    """The finished request; None where Ctrl-C came first. Pins the process to the engine's cores before."""
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
    """What retention is computed from, by label of the SSD runs. Ctrl-C leaves it out; the measurement is kept."""
    from infer.evaluation.retention import paired_tokens

    runs = [run for run in measured if run.mode is Mode.SSD]
    paired: dict[str, list[PairedTokens]] = {run.label: [] for run in runs}
    total = sum(len(run.answers) for run in runs)
    with ProgressDisplay("answers replayed with fresh features", total, console=stderr, quiet=not runs) as display:
        for run in runs:
            pairs = paired_tokens(run.answers, run.settings, target)
            while not interrupt and (pair := next(pairs, None)) is not None:
                paired[run.label].append(pair)
                display.advance()
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


if __name__ == "__main__":
    sys.exit(run_command(main))
