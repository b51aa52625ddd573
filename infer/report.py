"""Plots and a page for people out of `results.json`: `python -m infer.report runs/DIR/results.json` writes them again.

The page is one file: the plots stand in it as SVG, and nothing is fetched.
"""

from __future__ import annotations

import html
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafters.errors import UserError, run_command
from infer.console import Parser

COLOURS = {"ar": "#8a8f98", "sd": "#2a78b8", "ssd": "#d9541e"}
PARTS = (("verify", "verification", "#2a78b8"), ("drafting", "standing still for the drafter", "#d9541e"), ("other", "the rest", "#c9ccd1"))
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2127; background: #fff; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
.sub, .note { color: #5b626c; } .note { font-size: .9rem; max-width: 46rem; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0; }
.card { border: 1px solid #dfe2e6; border-radius: .5rem; padding: .7rem 1.1rem; } .card b { font-size: 1.7rem; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e7e9ec; white-space: nowrap; }
th { font-weight: 600; font-size: .85rem; } th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; } code { background: #f3f4f6; padding: 0 .25rem; }
"""
GLOSSARY = (
    ("ar, sd, ssd", "The target alone; target and drafter in turns; both at once, the drafter preparing for the outcomes it expects."),
    ("tokens/s", "Decoding speed: tokens after each answer's first, over the time they took. The forward of the prompt is left out."),
    ("tokens per round", "Tokens committed for each forward of the target, the target's own token included. Alone it makes 1."),
    ("acceptance at position j", "How often the j-th drafted token is accepted, where those before it were."),
    ("hit rate", "How often the outcome of a verification was among those prepared for. The first round of an answer is not counted."),
    ("waits / busy", "In hit rounds, the target's waits over the drafter's working time: near 0, drafting costs no time."),
    ("interval", "95 % bootstrap interval over prompts: prompts are drawn again with replacement, the modes of a prompt stay together."),
)


def main(argv: list[str]) -> int:
    """The command."""
    parser = Parser(
        "python -m infer.report", "Write report.html and plots/ again from a results.json.", "  python -m infer.report runs/x/results.json"
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
    parts = [f"<h1>{_text(title)}</h1><p class='sub'>{_text(subtitle)}</p>", _headline(results), _section("Modes", _runs_table(results))]
    for name, heading, note in SECTIONS:
        if plots.get(name):
            parts.append(_section(heading, f"<p class='note'>{_text(note)}</p>{plots[name]}"))
    parts += [_prediction(results), _agreement(results), _settings_table(results), _glossary()]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{_text(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{chr(10).join(filter(None, parts))}\n</body></html>\n"


def speed_plot(results: Mapping[str, Any]) -> str | None:
    """Tokens per second of each run, with intervals."""
    runs = [run for run in results["runs"] if run["tokens_per_second"]]

    def draw(axes: Axes) -> None:
        values = [run["tokens_per_second"] for run in runs]
        ends = [run["tokens_per_second_interval"] or [value, value] for run, value in zip(runs, values, strict=True)]
        errors = [[max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]]
        errors += [[max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]]
        axes.barh(
            range(len(runs)), values, xerr=errors, color=[COLOURS[run["mode"]] for run in runs], height=0.6, ecolor="#33373d", capsize=3
        )
        for row, (value, (_, high)) in enumerate(zip(values, ends, strict=True)):
            axes.annotate(f"{value:.1f}", (max(value, high), row), xytext=(6, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.set_xlim(right=1.15 * max(high for _, high in ends))
        axes.set_xlabel("tokens per second")

    return _plot(draw, height=0.8 + 0.5 * len(runs)) if runs else None


def acceptance_plot(results: Mapping[str, Any]) -> str | None:
    """Acceptance by position of the speculating runs."""
    runs = [run for run in results["runs"] if any(rate is not None for rate in run["acceptance_by_position"])]

    def draw(axes: Axes) -> None:
        for number, run in enumerate(runs):
            points = [(j, rate) for j, rate in enumerate(run["acceptance_by_position"], start=1) if rate is not None]
            style = "-" if run["label"] == run["mode"] else "--"
            axes.plot(*zip(*points, strict=True), style, marker="o", color=COLOURS[run["mode"]], label=run["label"], alpha=1 - 0.1 * number)
        longest = max(len(run["acceptance_by_position"]) for run in runs)
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the speculation")
        axes.set_ylabel("accepted, if those before were")
        axes.legend(frameon=False)

    return _plot(draw) if runs else None


def hit_plot(results: Mapping[str, Any]) -> str | None:
    """Tokens per round after a hit and after a miss."""
    runs = [run for run in results["runs"] if run["tokens_per_round_hit"] is not None or run["tokens_per_round_miss"] is not None]

    def draw(axes: Axes) -> None:
        kinds = (("tokens_per_round_hit", "after a hit", "#d9541e"), ("tokens_per_round_miss", "after a miss", "#f0b79d"))
        for offset, (name, label, colour) in zip((-0.2, 0.2), kinds, strict=True):
            values = [run[name] or 0.0 for run in runs]
            bars = axes.barh([row + offset for row in range(len(runs))], values, height=0.36, color=colour, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=5)
        axes.axvline(1, color="#33373d", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("tokens per round (dotted: the target alone)")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

    return _plot(draw, height=1.2 + 0.6 * len(runs)) if runs else None


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
            axes.annotate(f"{run['round_ms']['mean']:.1f}", (left[row], row), xytext=(5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(runs)), list(map(_tick, runs)))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("milliseconds of a mean round")
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=3)

    return _plot(draw, height=1.3 + 0.5 * len(runs)) if runs else None


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


def _plot(draw: Callable[[Axes], None], height: float = 3.2) -> str:
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _tick(run: Mapping[str, Any]) -> str:
    return run["label"].replace(" ", "\n")


def _headline(results: Mapping[str, Any]) -> str:
    names = {"ssd/ar": "ssd over the target alone", "ssd/sd": "ssd over sd", "sd/ar": "sd over the target alone"}
    names["ar/transformers"] = "the target alone over transformers' generate"
    cards = []
    for name, interval in results["ratio_intervals"].items():
        if interval:
            between = f"{interval['low']:.2f} to {interval['high']:.2f}"
            cards.append(f"<div class='card'><b>{interval['value']:.2f}x</b>{names[name]}<br><span class='sub'>{between}</span></div>")
    return f"<div class='cards'>{''.join(cards)}</div>" if cards else ""


def _runs_table(results: Mapping[str, Any]) -> str:
    head = ["", "tokens/s", "tokens per round", "hit rate", "after a hit", "after a miss", "waits / busy"]
    head += ["verify ms", "p90", "drafter ms", "p90", "wait ms", "p90", "new tokens", "prompts s", "decoding s"]
    rows = []
    for run in results["runs"]:
        spreads = [(run[name] or {}).get(part) for name in ("verify_ms", "draft_ms", "wait_ms") for part in ("p50", "p90")]
        row = [run["label"], _number(run["tokens_per_second"], 1), _number(run["tokens_per_round"], 2), _percent(run["hit_rate"])]
        row += [_number(run["tokens_per_round_hit"], 2), _number(run["tokens_per_round_miss"], 2), _percent(run["hidden"])]
        row += [_number(value, 1) for value in spreads]
        row += [str(run["new_tokens"]), _number(run["prefill_seconds"], 1), _number(run["seconds"], 1)]
        rows.append(row)
    return _table(head, rows)


def _prediction(results: Mapping[str, Any]) -> str:
    prediction = results["prediction"]
    if not prediction:
        return ""
    rows = [
        [name, _number(entry["predicted"], 2), _number(entry["measured"], 2), _percent(entry["share"])]
        for name, entry in prediction["ratios"].items()
    ]
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in prediction["times_ms"].items())
    note = f"<p class='note'>What the measured times and tokens per round should give if nothing else cost time. Times: {_text(times)}.</p>"
    return _section("Predicted and measured", note + _table(["", "predicted", "measured", "measured / predicted"], rows))


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
    return _section("Same tokens", f"<p class='note'>{note}</p>" + _table(["", "equal answers", "largest margin at a parting"], rows))


def _settings_table(results: Mapping[str, Any]) -> str:
    names = list(results["runs"][0]["settings"])
    rows = [[name, *(_shown(run["settings"][name]) for run in results["runs"])] for name in names]
    return _section("Settings", _table(["", *(run["label"] for run in results["runs"])], rows))


def _glossary() -> str:
    entries = "".join(f"<dt>{_text(term)}</dt><dd>{_text(meaning)}</dd>" for term, meaning in GLOSSARY)
    return _section("How to read this", f"<dl>{entries}</dl>")


def _section(heading: str, body: str) -> str:
    return f"<h2>{_text(heading)}</h2>\n{body}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _text(text: str) -> str:
    return html.escape(text)


if __name__ == "__main__":
    sys.exit(run_command(main))
