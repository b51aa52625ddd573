"""Plots and a page for people out of `results.json`: `python -m infer.report runs/DIR/results.json` writes them again.

The page is one file: the plots stand in it as SVG, and nothing is fetched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from drafters.base.errors import UserError, run_command
from drafters.base.pages import cards, number, page, percent, plot, section, table, text
from infer.console import Parser

COLOURS = {"ar": "#8a8f98", "sd": "#2a78b8", "ssd": "#d9541e"}
PARTS = (
    ("verify", "verification", "#2a78b8"),
    ("drafting", "standing still for the drafter", "#d9541e"),
    ("other", "the rest", "#c9ccd1"),
)
GLOSSARY = (
    (
        "ar, sd, ssd",
        "The target alone; target and drafter in turns; both at once, the drafter preparing for the outcomes it expects.",
    ),
    (
        "tokens/s",
        "Decoding speed: tokens after each answer's first, over the time they took. The forward of the prompt is left out.",
    ),
    (
        "tokens per round",
        "Tokens committed for each forward of the target, the target's own token included. Alone it makes 1.",
    ),
    ("acceptance at position j", "How often the j-th drafted token is accepted, where those before it were."),
    (
        "hit rate",
        "How often the outcome of a verification was among those prepared for. The first round of an answer is not counted.",
    ),
    (
        "retention",
        "Tokens per round after hits, over those of drafts from the target's own features at the same places (replayed afterwards): "
        "what is left when features lag behind.",
    ),
    (
        "waits / busy",
        "In hit rounds, the target's waits over the drafter's working time: near 0, drafting costs no time.",
    ),
    (
        "interval",
        "95 % bootstrap interval over prompts: prompts are drawn again with replacement, the modes of a prompt stay together.",
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
    """The page as HTML."""
    arguments, machine = results["arguments"], results["machine"]
    settings = results["runs"][0]["settings"]
    title = f"Speed of {results['target']['name']}"
    how = "greedy" if not arguments["temperature"] else f"temperature {arguments['temperature']}"
    subtitle = (
        f"{results['runs'][0]['prompts']} prompts, {how}, at most {arguments['max_new_tokens']} new tokens, {settings['dtype']}, "
        f"{machine['cpu']}, torch {machine['torch']}, transformers {machine['transformers']}"
    )
    parts = [_headline(results), section("Modes", _runs_table(results))]
    for name, heading, note in SECTIONS:
        if plots.get(name):
            parts.append(section(heading, plots[name] or "", note))
    parts += [_prediction(results), _agreement(results), _settings_table(results), _glossary()]
    return page(title, subtitle, parts)


def speed_plot(results: Mapping[str, Any]) -> str | None:
    """Tokens per second of each run, with intervals."""
    runs = [run for run in results["runs"] if run["tokens_per_second"]]

    def draw(axes: Axes) -> None:
        values = [run["tokens_per_second"] for run in runs]
        ends = [run["tokens_per_second_interval"] or [value, value] for run, value in zip(runs, values, strict=True)]
        errors = [[max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]]
        errors += [[max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]]
        axes.barh(
            range(len(runs)),
            values,
            xerr=errors,
            color=[COLOURS[run["mode"]] for run in runs],
            height=0.6,
            ecolor="#33373d",
            capsize=3,
        )
        for row, (value, (_, high)) in enumerate(zip(values, ends, strict=True)):
            axes.annotate(
                f"{value:.1f}", (max(value, high), row), xytext=(6, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.set_xlim(right=1.15 * max(high for _, high in ends))
        axes.set_xlabel("tokens per second")

    return plot(draw, height=0.8 + 0.5 * len(runs)) if runs else None


def acceptance_plot(results: Mapping[str, Any]) -> str | None:
    """Acceptance by position of the speculating runs."""
    runs = [run for run in results["runs"] if any(rate is not None for rate in run["acceptance_by_position"])]

    def draw(axes: Axes) -> None:
        for place, run in enumerate(runs):
            points = [(j, rate) for j, rate in enumerate(run["acceptance_by_position"], start=1) if rate is not None]
            style = "-" if run["label"] == run["mode"] else "--"
            axes.plot(
                *zip(*points, strict=True),
                style,
                marker="o",
                color=COLOURS[run["mode"]],
                label=run["label"],
                alpha=1 - 0.1 * place,
            )
        longest = max(len(run["acceptance_by_position"]) for run in runs)
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the speculation")
        axes.set_ylabel("accepted, if those before were")
        axes.legend(frameon=False)

    return plot(draw) if runs else None


def hit_plot(results: Mapping[str, Any]) -> str | None:
    """Tokens per round after a hit and after a miss."""
    runs = [
        run
        for run in results["runs"]
        if run["tokens_per_round_hit"] is not None or run["tokens_per_round_miss"] is not None
    ]

    def draw(axes: Axes) -> None:
        kinds = (
            ("tokens_per_round_hit", "after a hit", "#d9541e"),
            ("tokens_per_round_miss", "after a miss", "#f0b79d"),
        )
        for offset, (name, label, colour) in zip((-0.2, 0.2), kinds, strict=True):
            values = [run[name] or 0.0 for run in runs]
            bars = axes.barh(
                [row + offset for row in range(len(runs))], values, height=0.36, color=colour, label=label
            )
            axes.bar_label(bars, fmt="%.2f", padding=5)
        axes.axvline(1, color="#33373d", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("tokens per round (dotted: the target alone)")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

    return plot(draw, height=1.2 + 0.6 * len(runs)) if runs else None


def round_plot(results: Mapping[str, Any]) -> str | None:
    """What a mean round is made of, in milliseconds."""
    runs = [run for run in results["runs"] if run["round_ms"]]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(runs)
        for part, label, colour in PARTS:
            values = [max(0.0, run["round_ms"][part]) for run in runs]
            axes.barh(range(len(runs)), values, left=left, height=0.6, color=colour, label=label)
            left = [start + value for start, value in zip(left, values, strict=True)]
        for row, run in enumerate(runs):
            axes.annotate(
                f"{run['round_ms']['mean']:.1f}",
                (left[row], row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("milliseconds of a mean round")
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=3)

    return plot(draw, height=1.3 + 0.5 * len(runs)) if runs else None


PLOTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "speed": speed_plot,
    "acceptance": acceptance_plot,
    "hits": hit_plot,
    "round": round_plot,
}
SECTIONS = (
    ("speed", "Speed", "Decoding speed. The whiskers are 95 % intervals over prompts."),
    (
        "round",
        "Where a round's time goes",
        "A round is one forward of the target. In ssd the drafter works at the same time; only what it is late by shows.",
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


def _tick(run: Mapping[str, Any]) -> str:
    return run["label"].replace(" ", "\n")


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
    head = ["", "tokens/s", "tokens per round", "hit rate", "after a hit", "after a miss", "retention", "waits / busy"]
    head += ["verify ms", "p90", "drafter ms", "p90", "wait ms", "p90", "new tokens", "prompts s", "decoding s"]
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
            percent(run["hidden"]),
        ]
        row += [number(value, 1) for value in spreads]
        row += [str(run["new_tokens"]), number(run["prefill_seconds"], 1), number(run["seconds"], 1)]
        rows.append(row)
    return table(head, rows)


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
        margins = [parting["margin"] for parting in pair["partings"] if parting["margin"] is not None]
        largest = f"{max(margins):.3f}" if margins else ""
        rows.append([pair["pair"], f"{pair['equal']} of {pair['prompts']}", largest])
    note = (
        "All modes choose the target's likeliest token. In float32 they agree to the token. In bfloat16 forwards of different widths round "
        "differently, so answers may part where two tokens are nearly equally likely: the margin is the distance of their logits."
    )
    return section("Same tokens", table(["", "equal answers", "largest margin at a parting"], rows), note)


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
