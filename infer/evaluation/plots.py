"""Plots of `results.json`: speed, acceptance by position, tokens per round after hits and misses, parts of a round.

Each function takes the results and returns an SVG, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes

from drafters.base.pages import plot

COLOURS = {"ar": "#8a8f98", "sd": "#2a78b8", "ssd": "#d9541e"}
PARTS = (
    ("verify", "verification", "#2a78b8"),
    ("drafting", "waiting for the drafter", "#d9541e"),
    ("other", "the rest", "#c9ccd1"),
)


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


def _tick(run: Mapping[str, Any]) -> str:
    return run["label"].replace(" ", "\n")
