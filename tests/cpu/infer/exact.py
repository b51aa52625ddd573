"""AR, SD and SSD write the same tokens on the real target in fp32: `python -m tests.cpu.infer.exact --prompts 72`.

Ten settings of SD and SSD cover every pair of values of two settings. "few blocks" is a KV pool that holds two or
three requests: others wait, and some are preempted in the middle of their answers. "few branches" is one branch
per round: nearly every look-up misses. Texts may differ only where the target's two best logits are closer than
1e-4 (`margin`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.chat.render import render_prompt
from data.prompts import read_prompts
from drafters.targets.target import Target, load_target
from infer.config import EngineSettings, Mode
from infer.engine.request import SamplingParams
from infer.evaluation.figures import first_divergence
from infer.evaluation.results import logit_margin
from infer.launch import launch

ROOT = Path(__file__).parents[3]
TARGET, DRAFTER = "builtin:smollm2-135m", ROOT / "drafters" / "pretrained" / "smollm2-135m-eagle3"
PROMPTS = sorted((ROOT / "data" / "prompts").glob("*.jsonl"))
NEAR_TIE = 1e-4
FALLBACKS, REFRESHES, BATCHES, POLICIES = ("jit", "ngram", "none"), (0, 1, 3), (1, 4, 16), ("uniform", "geometric")
PRESSURES: dict[str, dict[str, Any]] = {"plenty": {}, "few blocks": {"kv_tokens": 512}, "few branches": {"budget": 1}}


class Setting(NamedTuple):
    """One engine's settings."""

    fallback: str
    refresh: int
    batch_size: int
    pressure: str
    policy: str

    @property
    def changes(self) -> dict[str, Any]:
        """As engine settings."""
        return {**self._asdict(), **PRESSURES[self.pressure]} | {"pressure": None}


CHOSEN = [
    "00000",
    "01110",
    "02220",
    "10120",
    "11200",
    "12011",
    "20210",
    "21021",
    "22101",
    "00221",
]  # indices of the values above
SETTINGS = [
    Setting(FALLBACKS[a], REFRESHES[b], BATCHES[c], list(PRESSURES)[d], POLICIES[e])
    for a, b, c, d, e in (map(int, row) for row in CHOSEN)
]


class Outcome(NamedTuple):
    """What one engine wrote: how often a request was sent away, and where texts parted from those expected, with the
    margin there.
    """

    answers: list[list[int]]
    preempted: int
    partings: dict[int, float | None]


def prompts_of(
    target: Target, count: int, files: Sequence[str | Path] = PROMPTS, longest: int = 400
) -> list[list[int]]:
    """That many prompts of the files (those that ship with the project), an even mix."""
    rendered = [render_prompt(prompt.messages, target.tokenizer) for prompt in read_prompts(files)]
    return [ids for ids in rendered if len(ids) <= longest][:count]


def write(
    target: Target,
    prompts: Sequence[list[int]],
    new_tokens: int,
    mode: Mode,
    expected: Sequence[list[int]] = (),
    **changes: Any,
) -> Outcome:
    """Answer all prompts on one engine and compare."""
    changes = {"lookahead": 3, "budget": 16, "batch_size": 16, "max_model_len": 448, "kv_tokens": 16 * 448} | changes
    devices: Any = {"target_devices": ("cpu",), "draft_devices": ("cpu",)}
    fields = {name: value for name, value in changes.items() if name != "pressure"}
    settings = EngineSettings(target=TARGET, drafter=str(DRAFTER), dtype="float32", **devices, **fields)
    ended: dict[str, list[int]] = {}
    preempted = 0
    with launch(settings, mode, target, in_process=True) as engine:
        schedule = engine.scheduler.schedule

        def counted() -> Any:
            nonlocal preempted
            round_ = schedule()
            preempted += len(round_.preempted)
            return round_

        engine.scheduler.schedule = counted  # type: ignore[method-assign]
        names = [engine.submit(prompt, SamplingParams(max_new_tokens=new_tokens)) for prompt in prompts]
        while engine.has_work:
            ended |= {o.request_id: o.request.new_tokens for o in engine.step() if o.finish_reason}
        engine.check()
    answers = [ended[name] for name in names]
    return Outcome(answers, preempted, partings(target, prompts, expected or answers, answers))


def partings(
    target: Target, prompts: Sequence[list[int]], expected: Sequence[list[int]], answers: Sequence[list[int]]
) -> dict[int, float | None]:
    """By prompt, the margin between the two tokens where its answers part."""
    found: dict[int, float | None] = {}
    for number, (prompt, first, second) in enumerate(zip(prompts, expected, answers, strict=True)):
        if parting := first_divergence(first, second):
            found[number] = logit_margin(target, [*prompt, *first[: parting.index]], parting.first, parting.second)
    return found


def is_exact(outcome: Outcome) -> bool:
    """Whether texts parted at near-ties only."""
    return all(margin is not None and margin < NEAR_TIE for margin in outcome.partings.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--files", nargs="+", default=PROMPTS, help="prompt files (default: those in data/prompts)")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        default=range(len(SETTINGS)),
        help="numbers of the settings, from 0 (default: all)",
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    target = load_target(TARGET, "float32")
    prompts = prompts_of(target, options.prompts, options.files)
    expected = write(target, prompts, options.new_tokens, Mode.AR).answers
    runs = [("sd", Mode.SD, {})] + [(f"ssd {tuple(SETTINGS[i])}", Mode.SSD, SETTINGS[i].changes) for i in options.only]
    exact = True
    for name, mode, changes in runs:
        started = time.monotonic()
        outcome = write(target, prompts, options.new_tokens, mode, expected, **changes)
        exact = exact and is_exact(outcome)
        parted = f"partings at near-ties {outcome.partings}" if outcome.partings else "equal"
        verdict = parted if is_exact(outcome) else f"WRONG: {outcome.partings}"
        print(
            f"{name}: {len(prompts)} prompts {verdict}, {outcome.preempted} preempted, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
