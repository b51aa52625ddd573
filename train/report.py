"""report.html of a training run, out of its `metrics.jsonl`: `python -m train.report runs/train/NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes

from drafters.base.errors import CommandParser, UserError, run_command
from drafters.base.pages import cards, number, page, percent, plot, section, table
from train.monitor.metrics import METRICS_FILE, flatten

REPORT_FILE = "report.html"
Record = Mapping[str, Any]
GREY, ORANGE = "#8a8f98", "#d9541e"


class History(NamedTuple):
    """A run's records by step: the newest start, the optimizer steps, the held-out measurements."""

    start: Record
    steps: list[Record]
    heldout: list[Record]


def main(argv: list[str]) -> int:
    """The command."""
    parser = CommandParser(
        "python -m train.report",
        "Write a run's report.html from its metrics.jsonl.",
        "  python -m train.report runs/train/x",
    )
    parser.add_argument("run", metavar="DIRECTORY", help="the `output` of a training run")
    print(f"written: {write_report(Path(parser.parse_args(argv).run))}")
    return 0


def write_report(run: Path) -> Path:
    """Write `report.html` into the run's directory; returns its path."""
    file = run / METRICS_FILE
    if not file.is_file():
        raise UserError(f"{file} is not there: {run} is no directory of a training run, or nothing was trained yet")
    path = run / REPORT_FILE
    path.write_text(render(run.name, read_history(file.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    return path


def read_history(lines: Sequence[str]) -> History:
    """Sort the records. A step that was done again after a resume counts once, as it was done last; a cut last line is
    left out.
    """
    start: Record = {}
    steps: dict[int, Record] = {}
    heldout: dict[int, Record] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # killed while writing
        if "settings" in record:
            start = record
        elif "heldout" in record:
            heldout[record["step"]] = record["heldout"]
        else:
            steps[record["step"]] = record
    return History(
        start, [{"step": s, **steps[s]} for s in sorted(steps)], [{"step": s, **heldout[s]} for s in sorted(heldout)]
    )


def render(name: str, history: History) -> str:
    """The page as HTML."""
    facts = [f"{len(history.steps)} optimizer steps"]
    facts += [f"{history.start[key]}" for key in ("machine",) if key in history.start]
    parts = [_headline(history.heldout)]
    for heading, note, draw in SECTIONS:
        svg = draw(history)
        if svg is not None:
            parts.append(section(heading, svg, note))
    parts += [_depth_table(history.heldout), _settings(history.start)]
    return page(f"Training of {name}", ", ".join(facts), parts)


def loss_plot(history: History) -> str | None:
    """The training loss, its stages of the curriculum marked."""
    return _curves(history, {"loss": [step.get("loss") for step in history.steps]}, "loss", stages=True)


def depth_plot(history: History) -> str | None:
    """Training accuracy of each depth against steps."""
    depths = max((len(step.get("accuracy", ())) for step in history.steps), default=0)
    series = {str(d): [_at(step.get("accuracy"), d) for step in history.steps] for d in range(depths)}
    return _curves(history, series, "top-1 accuracy", stages=True, title="depth")


def rate_plot(history: History) -> str | None:
    """The learning rate against steps."""
    return _curves(history, {"learning rate": [step.get("lr") for step in history.steps]}, "learning rate", raw=False)


def norm_plot(history: History) -> str | None:
    """The gradient's norm before clipping."""
    return _curves(
        history, {"gradient norm": [step.get("grad_norm") for step in history.steps]}, "norm", stages=True, log=True
    )


def speed_plot(history: History) -> str | None:
    """Tokens per second against steps."""
    return _curves(
        history,
        {"tokens": [step.get("tokens_per_second") for step in history.steps]},
        "tokens per second",
        stages=True,
    )


def utilisation_plot(history: History) -> str | None:
    """Model FLOP utilisation against steps."""
    shares = [step.get("utilisation") for step in history.steps]
    return _curves(history, {"share": shares}, "share of the products' rate", stages=True)


def tau_plot(history: History) -> str | None:
    """Tokens per round on held-out data against steps: fresh, and in SSD's order by budget."""
    series = {"fresh": [record.get("tau_fresh") for record in history.heldout]}
    series |= {f"SSD, budget {budget}": values for budget, values in _by_budget(history, "tau").items()}
    return _heldout_curves(history, series, "tokens per round")


def share_plot(history: History) -> str | None:
    """Hit rate and retention on held-out data against steps."""
    series = {f"hit rate, budget {budget}": values for budget, values in _by_budget(history, "hit_rate").items()}
    series |= {f"retention, budget {budget}": values for budget, values in _by_budget(history, "retention").items()}
    return _heldout_curves(history, series, "share")


def predicted_plot(history: History) -> str | None:
    """The speed the held-out figures predict: what the best checkpoint is chosen by."""
    return _heldout_curves(
        history, {"over the target alone": [r.get("predicted_speed") for r in history.heldout]}, "predicted speed"
    )


def heldout_depth_plot(history: History) -> str | None:
    """Held-out accuracy and expected acceptance by depth, first and last measurement."""
    if not history.heldout or not history.heldout[-1].get("accuracy"):
        return None

    def draw(axes: Axes) -> None:
        for record, alpha in ((history.heldout[0], 0.35), (history.heldout[-1], 1.0)):
            for name, colour in (("acceptance", ORANGE), ("accuracy", GREY)):
                if record.get(name):
                    axes.plot(
                        record[name], marker="o", color=colour, alpha=alpha, label=f"{name}, step {record['step']}"
                    )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("depth: drafter steps since a true feature")
        axes.legend(frameon=False)

    return plot(draw)


SECTIONS: tuple[tuple[str, str, Callable[[History], str | None]], ...] = (
    (
        "Held-out: by depth",
        "How well the next token is predicted, the further the drafter runs on its own outputs.",
        heldout_depth_plot,
    ),
    (
        "Held-out: tokens per round",
        "Fresh: every round starts at true features. SSD: in serving's order, features lag behind.",
        tau_plot,
    ),
    (
        "Held-out: hits and retention",
        "How often the outcome was prepared for, and what lagging features leave of a draft.",
        share_plot,
    ),
    (
        "Held-out: predicted speed",
        "With the times given in the settings; the best checkpoint is the one with the highest.",
        predicted_plot,
    ),
    ("Loss", "Of each optimizer step (light) and averaged (dark). Dotted: the curriculum goes deeper.", loss_plot),
    ("Accuracy by depth", "On the training rows, averaged.", depth_plot),
    ("Learning rate", "", rate_plot),
    ("Gradient norm", "Before clipping.", norm_plot),
    ("Tokens per second", "Of all processes together, padding left out.", speed_plot),
    (
        "Model FLOP utilisation",
        "Time of a step's bare matrix products over its time. On a GPU they run at its peak, "
        "on a CPU as measured in the same shapes.",
        utilisation_plot,
    ),
)


def _curves(
    history: History,
    series: Mapping[str, Sequence[float | None]],
    label: str,
    *,
    stages: bool = False,
    raw: bool = True,
    log: bool = False,
    title: str | None = None,
) -> str | None:
    """Lines over optimizer steps; many are coloured from dark to light and smoothed, one alone is shown raw beneath
    its average.
    """
    points = {
        name: [(s["step"], v) for s, v in zip(history.steps, vs, strict=True) if v is not None]
        for name, vs in series.items()
    }
    points = {name: found for name, found in points.items() if found}
    if not points:
        return None

    def draw(axes: Axes) -> None:
        for place, (name, found) in enumerate(points.items()):
            steps, values = zip(*found, strict=True)
            colour = ORANGE if len(points) == 1 else colormaps["viridis"](place / len(points))
            if len(points) == 1 and raw:
                axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
            axes.plot(steps, smooth(values) if raw else values, color=colour, label=name, linewidth=1.2)
        if stages:
            for before, after in zip(history.steps, history.steps[1:], strict=False):
                if before.get("depth") != after.get("depth"):
                    axes.axvline(after["step"], color="#33373d", linewidth=0.8, linestyle=":")
        if log:
            axes.set_yscale("log")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        if len(points) > 1:
            axes.legend(
                frameon=False, title=title, loc="upper left", bbox_to_anchor=(1, 1), ncols=1 + len(points) // 13
            )

    return plot(draw)


def _heldout_curves(history: History, series: Mapping[str, Sequence[float | None]], label: str) -> str | None:
    points = {
        name: [(r["step"], v) for r, v in zip(history.heldout, vs, strict=True) if v is not None]
        for name, vs in series.items()
    }
    points = {name: found for name, found in points.items() if found}
    if not points:
        return None

    def draw(axes: Axes) -> None:
        for name, found in points.items():
            axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

    return plot(draw)


def smooth(values: Sequence[float], share: float = 0.04) -> list[float]:
    """The mean over the last `share` of as many values: no value of the future, and as many points as came in."""
    width = max(1, round(share * len(values)))
    return [sum(values[max(0, end - width) : end]) / min(end, width) for end in range(1, len(values) + 1)]


def _by_budget(history: History, name: str) -> dict[int, list[float | None]]:
    budgets = sorted({entry["budget"] for record in history.heldout for entry in record.get("lagged", ())})
    found = [{entry["budget"]: entry.get(name) for entry in record.get("lagged", ())} for record in history.heldout]
    return {budget: [entries.get(budget) for entries in found] for budget in budgets}


def _headline(heldout: Sequence[Record]) -> str:
    if not heldout:
        return ""
    best = max(heldout, key=lambda record: record.get("predicted_speed") or 0.0)
    entries = [
        (
            f"{best.get('predicted_speed') or 0.0:.2f}x",
            "predicted speed over the target alone",
            f"best, at step {best['step']}",
        )
    ]
    entries.append((number(best.get("tau_fresh"), 2), "tokens per round, fresh features", "held-out"))
    for entry in best.get("lagged", ())[-1:]:
        entries.append((number(entry.get("tau"), 2), "tokens per round in SSD's order", f"budget {entry['budget']}"))
        entries.append((percent(entry.get("hit_rate")), "hit rate", f"budget {entry['budget']}"))
        entries.append((number(entry.get("retention"), 2), "retention", f"budget {entry['budget']}"))
    return cards(entries)


def _depth_table(heldout: Sequence[Record]) -> str:
    if not heldout or not heldout[-1].get("accuracy"):
        return ""
    last = heldout[-1]
    rows = [
        [
            str(d),
            number(last["accuracy"][d], 3),
            number(_at(last.get("acceptance"), d), 3),
            number(_at(last.get("loss"), d), 3),
        ]
        for d in range(len(last["accuracy"]))
    ]
    return section(
        f"Held-out by depth, step {last['step']}",
        table(["depth", "top-1 accuracy", "expected acceptance", "loss"], rows),
    )


def _settings(start: Record) -> str:
    rows = [[name, "" if value is None else str(value)] for name, value in flatten(start.get("settings", {})).items()]
    return section("Settings", table(["", ""], rows)) if rows else ""


def _at(values: Sequence[float] | None, place: int) -> float | None:
    return values[place] if values is not None and place < len(values) else None


if __name__ == "__main__":
    sys.exit(run_command(main))
