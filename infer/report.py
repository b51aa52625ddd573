"""Write the HTML report and the plots of a `results.json` again: `python -m infer.report runs/DIR/results.json`.

The report is one file that holds the plots as SVG and fetches nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.base.errors import UserError, run_command
from drafters.base.pages import cards, number, page, percent, section, table, text
from infer.console import Parser
from infer.evaluation.plots import PLOTS

GLOSSARY = (
    (
        "ar, sd, ssd",
        "The target alone; target and drafter in turns; both at once, the drafter preparing for expected outcomes.",
    ),
    (
        "tokens/s",
        "Decoding speed: tokens after each answer's first, over the time they took. The prompt's forward is left out.",
    ),
    (
        "tokens per round",
        "Tokens committed for each forward of the target, the target's own token included. Alone it makes 1.",
    ),
    ("acceptance at position j", "How often the j-th drafted token is accepted, where those before it were."),
    (
        "hit rate",
        "Share of verifications whose outcome was prepared for; an answer's first round is left out.",
    ),
    (
        "retention",
        "Tokens per round after hits, over those of drafts from fresh target features at the same places (replayed "
        "afterwards): what is left when features lag behind.",
    ),
    (
        "exposed share",
        "In hit rounds, the target's waits over the draft process's working time: near 0, drafting costs no time.",
    ),
    (
        "interval",
        "95 % bootstrap interval: prompts are drawn again with replacement, the modes of a prompt stay together.",
    ),
)


def main(argv: list[str]) -> int:
    """The command."""
    parser = Parser(
        "python -m infer.report",
        "Write report.html and plots/ again from a results.json.",
        "  python -m infer.report runs/x/results.json",
    )
    parser.add_argument("results", metavar="FILE", help="a results.json of infer.evaluate")
    path = Path(parser.read(argv).results)
    if not path.is_file():
        raise UserError(f"no such file: {path} (infer.evaluate writes results.json into its --out directory)")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        page = write_report(results, path.parent)
    except (json.JSONDecodeError, KeyError) as error:
        raise UserError(f"{path} is no results.json of infer.evaluate ({error!r}): measure again") from error
    print(f"written: {page}")
    return 0


def write_report(results: Mapping[str, Any], out: Path) -> Path:
    """Write `plots/*.svg` and `report.html` into `out`; returns the page's path."""
    plots = {name: draw(results) for name, draw in PLOTS.items()}
    (out / "plots").mkdir(exist_ok=True)
    for name, svg in plots.items():
        if svg is not None:
            (out / "plots" / f"{name}.svg").write_text(svg, encoding="utf-8")
    page = out / "report.html"
    page.write_text(render_page(results, plots), encoding="utf-8")
    return page


def render_page(results: Mapping[str, Any], plots: Mapping[str, str | None]) -> str:
    """The report as HTML."""
    arguments, machine = results["arguments"], results["machine"]
    settings = results["runs"][0]["settings"]
    title = f"Speed of {results['target']['name']}"
    how = "greedy" if not arguments["temperature"] else f"temperature {arguments['temperature']}"
    subtitle = (
        f"{results['runs'][0]['prompts']} prompts, {how}, at most {arguments['max_new_tokens']} new tokens, "
        f"{settings['dtype']}, {machine['cpu']}, torch {machine['torch']}, transformers {machine['transformers']}"
    )
    parts = [_headline(results), section("Modes", _runs_table(results))]
    for name, heading, note in SECTIONS:
        if plots.get(name):
            parts.append(section(heading, plots[name] or "", note))
    parts += [_prediction(results), _agreement(results), _settings_table(results), _glossary()]
    return page(title, subtitle, parts)


SECTIONS = (
    ("speed", "Speed", "Decoding speed. The whiskers are 95 % intervals over prompts."),
    (
        "round",
        "Where a round's time goes",
        "A round is one forward of the target. In ssd the drafter works meanwhile; only its exposed time shows.",
    ),
    (
        "acceptance",
        "Acceptance by position",
        "How far ahead the drafter is right. In ssd it drafts further from the target's own features than in sd.",
    ),
    (
        "hits",
        "After a hit and after a miss",
        "Hits serve a speculation that was prepared before its outcome was known; a miss is answered by the fallback.",
    ),
)


def _headline(results: Mapping[str, Any]) -> str:
    names = {"ssd/ar": "ssd over the target alone", "ssd/sd": "ssd over sd", "sd/ar": "sd over the target alone"}
    names["ar/transformers"] = "the target alone over transformers' generate"
    entries = []
    for name, interval in results["ratio_intervals"].items():
        if interval:
            entries.append(
                (f"{interval['value']:.2f}x", names[name], f"{interval['low']:.2f} to {interval['high']:.2f}")
            )
    return cards(entries)


def _runs_table(results: Mapping[str, Any]) -> str:
    head = ["", "tokens/s", "tokens per round", "hit rate", "after a hit", "after a miss", "retention"]
    head += ["exposed share", "verify ms", "p90", "drafter ms", "p90", "wait ms", "p90", "new tokens"]
    head += ["prompts s", "decoding s"]
    rows = []
    for run in results["runs"]:
        spreads = [
            (run[name] or {}).get(part) for name in ("verify_ms", "draft_ms", "wait_ms") for part in ("p50", "p90")
        ]
        row = [
            run["label"],
            number(run["tokens_per_second"], 1),
            number(run["tokens_per_round"], 2),
            percent(run["hit_rate"]),
        ]
        row += [
            number(run["tokens_per_round_hit"], 2),
            number(run["tokens_per_round_miss"], 2),
            _retention(run),
            percent(_exposed_share(run)),
        ]
        row += [number(value, 1) for value in spreads]
        row += [str(run["new_tokens"]), number(run["prefill_seconds"], 1), number(run["seconds"], 1)]
        rows.append(row)
    return table(head, rows)


def _exposed_share(run: Mapping[str, Any]) -> float | None:
    """The figure of that name; older results.json files call it `hidden`."""
    return run["exposed_share"] if "exposed_share" in run else run["hidden"]


def _retention(run: Mapping[str, Any]) -> str:
    kept = run.get("retention")
    return f"{kept['value']:.2f} ({kept['low']:.2f} to {kept['high']:.2f})" if kept else ""


def _prediction(results: Mapping[str, Any]) -> str:
    prediction = results["prediction"]
    if not prediction:
        return ""
    rows = [
        [name, number(entry["predicted"], 2), number(entry["measured"], 2), percent(entry["share"])]
        for name, entry in prediction["ratios"].items()
    ]
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in prediction["times_ms"].items())
    note = f"What the measured times and tokens per round should give if nothing else cost time. Times: {times}."
    return section("Predicted and measured", table(["", "predicted", "measured", "measured / predicted"], rows), note)


def _agreement(results: Mapping[str, Any]) -> str:
    if not results["agreement"]:
        return ""
    rows = []
    for pair in results["agreement"]:
        margins = [found["margin"] for found in pair["partings"] if found["margin"] is not None]
        largest = f"{max(margins):.3f}" if margins else ""
        rows.append([pair["pair"], f"{pair['equal']} of {pair['prompts']}", largest])
    note = (
        "All modes choose the target's likeliest token. In float32 they agree to the token. In bfloat16 forwards of "
        "different widths round differently, so answers may diverge where two tokens are nearly equally likely: the "
        "margin is the distance of their logits."
    )
    return section("Same tokens", table(["", "equal answers", "largest margin where they diverge"], rows), note)


def _settings_table(results: Mapping[str, Any]) -> str:
    names = list(results["runs"][0]["settings"])
    rows = [[name, *(_shown(run["settings"][name]) for run in results["runs"])] for name in names]
    return section("Settings", table(["", *(run["label"] for run in results["runs"])], rows))


def _glossary() -> str:
    entries = "".join(f"<dt>{text(term)}</dt><dd>{text(meaning)}</dd>" for term, meaning in GLOSSARY)
    return section("How to read this", f"<dl>{entries}</dl>")


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(run_command(main))
