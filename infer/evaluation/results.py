"""The content of `results.json`: the machine, the runs with their figures, ratios, agreement and predicted speeds."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drafters.base.files import atomic_write_text
from drafters.eagle3_ssd.card import read_card
from drafters.eagle3_ssd.speed import PairedTokens, retention
from infer.config import BASELINE, EngineSettings, Mode
from infer.engine.request import Request, RoundRecord
from infer.evaluation.figures import (
    LOOKED_UP,
    MISSES,
    acceptance_by_position,
    drafting_seconds,
    exposed_share,
    first_divergence,
    hit_rate,
    measured_times,
    percentiles_ms,
    predicted_ratios,
    ratio_interval,
    round_seconds,
    rounds_of,
    speed_interval,
    tokens_per_round,
    tokens_per_second,
)
from infer.ipc.messages import Source

if TYPE_CHECKING:
    from drafters.targets.target import Target

RATIOS = (("ssd", "ar"), ("ssd", "sd"), ("sd", "ar"), ("ar", BASELINE))


class Measured(NamedTuple):
    """One mode with its settings, and its finished requests: one for each prompt, in the same order in every run."""

    label: str
    mode: Mode
    settings: EngineSettings
    prompt_ids: list[str]
    answers: list[Request]


def build_results(
    runs: Sequence[Measured],
    target: Target,
    arguments: Mapping[str, Any],
    paired: Mapping[str, Sequence[PairedTokens]],
) -> dict[str, Any]:
    """The content of `results.json`. Only runs whose label is their mode, and the baseline, enter the ratios.

    `paired` holds, by label of a run, what its retention is computed from.
    """
    plain = {run.label: run for run in runs if run.label in (run.mode, BASELINE)}
    drafter = next((run.settings.drafter for run in runs if run.mode is not Mode.AR), None)
    intervals = {
        f"{fast}/{slow}": ratio_interval(plain[fast].answers, plain[slow].answers)
        for fast, slow in RATIOS
        if fast in plain and slow in plain
    }
    ratios = {name: interval.value if interval else None for name, interval in intervals.items()}
    greedy = not arguments.get("temperature")
    return {
        "machine": machine_facts(),
        "target": asdict(target.facts),
        "drafter": None
        if drafter is None
        else {"path": drafter, "card": read_card(Path(drafter)).model_dump(mode="json")},
        "arguments": dict(arguments),
        "runs": [run_record(run, paired.get(run.label, ())) for run in runs],
        "ratios": ratios,
        "ratio_intervals": {name: interval and interval._asdict() for name, interval in intervals.items()},
        "agreement": [agreement(a, b, target) for a, b in combinations(plain.values(), 2)] if greedy else [],
        "prediction": prediction(plain, ratios),
    }


def run_record(run: Measured, paired: Sequence[PairedTokens] = ()) -> dict[str, Any]:
    """The figures of one run. Times are in seconds, or in milliseconds where the name ends in `_ms`."""
    answers, rounds = run.answers, rounds_of(run.answers)
    cached = rounds if run.mode is Mode.SSD else []
    interval = speed_interval(answers)
    return {
        "label": run.label,
        "mode": run.mode.value,
        "settings": run.settings.model_dump(mode="json"),
        "prompts": len(answers),
        "new_tokens": sum(len(answer.new_tokens) for answer in answers),
        "seconds": sum(answer.decode_seconds for answer in answers),
        "prefill_seconds": sum(answer.prefill_seconds for answer in answers),
        "tokens_per_second": tokens_per_second(answers),
        "tokens_per_second_interval": interval and [interval.low, interval.high],
        "rounds": len(rounds),
        "tokens_per_round": tokens_per_round(rounds),
        "acceptance_by_position": acceptance_by_position(rounds, run.settings.lookahead)
        if run.mode is not Mode.AR
        else [],
        "hit_rate": hit_rate(cached),
        "tokens_per_round_hit": tokens_per_round(cached, [Source.HIT]),
        "tokens_per_round_miss": tokens_per_round(cached, MISSES),
        "retention": retention_record(paired),
        "exposed_share": exposed_share(cached),
        "verify_ms": _percentiles([record.verify for record in rounds]),
        "draft_ms": _percentiles([record.draft for record in rounds]),
        "wait_ms": _percentiles([record.wait for record in rounds]),
        "wait_hit_ms": _percentiles([record.wait for record in cached if record.source is Source.HIT]),
        "wait_miss_ms": _percentiles([record.wait for record in cached if record.source in MISSES]),
        "round_ms": _round_split(answers, rounds),
        "sources": {source.value: sum(record.source is source for record in rounds) for source in Source},
        "outputs": [_output(name, answer) for name, answer in zip(run.prompt_ids, answers, strict=True)],
    }


def retention_record(paired: Sequence[PairedTokens]) -> dict[str, float] | None:
    """Retention with its interval, and the tokens per round that it compares; None where no hit round was paired."""
    found = retention(paired)
    if found is None:
        return None
    rounds = sum(pair.rounds for pair in paired)
    served, fresh = (
        1 + sum(counts) / rounds for counts in zip(*((pair.served, pair.fresh) for pair in paired), strict=True)
    )
    return {**found._asdict(), "rounds": rounds, "tokens_per_round_served": served, "tokens_per_round_fresh": fresh}


def agreement(first: Measured, second: Measured, target: Target) -> dict[str, Any]:
    """On how many prompts two runs gave the same tokens; where the others diverge, with the target's margin there."""
    divergences = []
    for name, a, b in zip(first.prompt_ids, first.answers, second.answers, strict=True):
        found = first_divergence(a.new_tokens, b.new_tokens)
        if found is not None:
            prefix = [*a.prompt_ids, *a.new_tokens[: found.index]]
            margin = logit_margin(target, prefix, found.first, found.second)
            divergences.append({"id": name, **found._asdict(), "margin": margin})
    return {
        "pair": f"{first.label}/{second.label}",
        "prompts": len(first.answers),
        "equal": len(first.answers) - len(divergences),
        "partings": divergences,
    }


@torch.no_grad()
def logit_margin(target: Target, prefix_ids: Sequence[int], first: int | None, second: int | None) -> float | None:
    """Distance of the target's logits of two tokens after `prefix_ids`, from one plain forward in its own dtype.

    The two rows of the LM head are applied in fp32. A margin near the resolution of the dtype (0.125 for bf16 logits
    of 16 to 32) is a near-tie. None where one of the answers has ended.
    """
    if first is None or second is None:
        return None
    from infer.kernels.attention.context import DocumentContext

    ids = torch.tensor([list(prefix_ids)], device=target.device)
    context = DocumentContext(torch.ones_like(ids))
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    output = target.model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, context=context)
    pair = torch.tensor([first, second], device=target.device)
    logits = target.head.rows(pair).float()(output.last_hidden_state[0, -1].float())
    return abs(float(logits[0] - logits[1]))


def prediction(plain: Mapping[str, Measured], ratios: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Speed ratios by the formula (infer/README.md, section 3), from measured times, beside the measured ratios."""
    if not {"ar", "sd", "ssd"} <= plain.keys():
        return None
    ar, sd, ssd = (plain[mode].answers for mode in ("ar", "sd", "ssd"))
    times = measured_times(ar, sd, ssd)
    if times is None:
        return None
    predicted = predicted_ratios(rounds_of(sd), rounds_of(ssd), times)
    return {
        "times_ms": {
            "autoregressive": 1000 * times.ssd.autoregressive,
            "sd verify": 1000 * times.sd.verify,
            "sd draft": 1000 * times.sd.draft,
            "ssd verify": 1000 * times.ssd.verify,
            "ssd background": 1000 * times.ssd.background,
            "ssd fallback": 1000 * times.ssd.fallback,
        },
        "ratios": {
            name: {"predicted": value, "measured": ratios[name], "share": (ratios[name] or 0.0) / value}
            for name, value in predicted.items()
        },
    }


def machine_facts() -> dict[str, Any]:
    """Hardware and library versions."""
    import transformers

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file atomically, so that a reader never sees half of it."""
    atomic_write_text(path, json.dumps(content, indent=1) + "\n")


def _output(name: str, answer: Request) -> dict[str, Any]:
    return {
        "id": name,
        "token_ids": answer.new_tokens,
        "prompt_tokens": len(answer.prompt_ids),
        "seconds": answer.decode_seconds,
        "finish_reason": answer.finish_reason,
        "rounds": len(answer.rounds),
        "hits": sum(record.source is Source.HIT for record in answer.rounds),
        "looked_up": sum(record.source in LOOKED_UP for record in answer.rounds),
    }


def _round_split(answers: Sequence[Request], rounds: Sequence[RoundRecord]) -> dict[str, float] | None:
    """Mean round in milliseconds: verification, waiting for the drafter, and the rest (sampling, bookkeeping)."""
    whole = round_seconds(answers)
    if whole is None:
        return None
    verify = sum(record.verify for record in rounds) / len(rounds)
    drafting = sum(map(drafting_seconds, rounds)) / len(rounds)
    parts = {"mean": whole, "verify": verify, "drafting": drafting, "other": whole - verify - drafting}
    return {name: 1000 * seconds for name, seconds in parts.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    percentiles = percentiles_ms(seconds)
    return percentiles and percentiles._asdict()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
