"""The experiment's table and plots, from the drafters' cards and the engine's results.

`python recipes/smollm2-135m/experiments/figures.py` reads runs/experiments/NAME/final-eagle3/drafter_card.json and the
results.json in runs/engine/NAME and runs/engine/layers (README.md beside this file has the commands that write them);
prints the table in Markdown, the differences from A with intervals over the prompts that both answered, and writes
plots/depth.png and plots/layers.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from drafters.base.bootstrap import bootstrap_interval
from drafters.eagle3_ssd.card import read_card

ENGINE, EXPERIMENTS, PLOTS = Path("runs/engine"), Path("runs/experiments"), Path(__file__).parents[1] / "plots"
LAYERS = {"F-1": 1, "F-2": 2, "E-acceptance": 4, "F-6": 6}


def row(name: str, results: dict[str, Any]) -> str:
    """One line of the table. SSD's budgets stand in the order 6, 12, 24."""
    runs = _runs(results)
    served = [runs[label] for label in ("ssd budget=6", "ssd", "ssd budget=24")]
    kept = [run["retention"]["value"] for run in served]
    columns = [f"{runs['sd']['tokens_per_round']:.2f}"]
    columns += [
        " ".join(f"{run['tokens_per_round']:.2f}" for run in served),
        " ".join(f"{run['hit_rate']:.2f}" for run in served),
    ]
    columns += [" ".join(f"{value:.2f}" for value in kept)]
    held = read_card(EXPERIMENTS / name / "final-eagle3").heldout if (EXPERIMENTS / name).exists() else None
    columns += (
        [f"{held['tau_fresh']:.2f}", " ".join(f"{held['accuracy'][depth]:.2f}" for depth in (0, 1, 3, 5, 10))]
        if held
        else ["", ""]
    )
    return f"| {name} | " + " | ".join(columns) + " |"


def difference(results: dict[str, Any], base: dict[str, Any], label: str, over: str, under: str) -> str:
    """Difference of the ratio of two sums over prompts, with its 95 % interval; prompts are drawn in pairs."""
    by_id = [{answer["id"]: answer for answer in _runs(side)[label]["outputs"]} for side in (results, base)]
    assert by_id[0].keys() == by_id[1].keys(), "the two have not answered the same prompts"
    counts = [
        [np.array([_count(answers[name], what) for name in by_id[0]]) for what in (over, under)] for answers in by_id
    ]

    def statistic(drawn_SN: np.ndarray) -> np.ndarray:
        own, other = (above[drawn_SN].sum(1) / below[drawn_SN].sum(1) for above, below in counts)
        return own - other

    interval = bootstrap_interval(statistic, len(by_id[0]))
    assert interval is not None, f"{label}: no {under} to divide by"
    return f"{interval.value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def _runs(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["label"]: run for run in results["runs"]}


def _count(answer: dict[str, Any], what: str) -> int:
    return (
        len(answer["token_ids"]) - 1 if what == "tokens" else answer[what]
    )  # the first token is the prompt's, no round gave it


def differences(everything: dict[str, dict[str, Any]], base: str) -> None:
    """Print a table of the paired differences from `base`."""
    print(f"\n| less {base} | tau fresh | tau in SSD, budget 12 | hit rate, budget 12 |\n|---|---|---|---|")
    for name, results in everything.items():
        if name != base:
            ratios = ("sd", "tokens", "rounds"), ("ssd", "tokens", "rounds"), ("ssd", "hits", "looked_up")
            print(
                f"| {name} | " + " | ".join(difference(results, everything[base], *ratio) for ratio in ratios) + " |"
            )


def plot_depth() -> None:
    """Held-out top-1 by depth."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    drafters = {"start (depth 1)": Path("runs/train/warm/final-eagle3")}
    drafters |= {name: EXPERIMENTS / name / "final-eagle3" for name in ("A", "B-flat", "C-replay", "E-acceptance")}
    drafters["shipped"] = Path("drafters/pretrained/smollm2-135m-eagle3")
    for label, directory in drafters.items():
        axes.plot(read_card(directory).heldout["accuracy"], marker="o", markersize=3, label=label)
    axes.set(xlabel="depth (steps on the drafter's own features)", ylabel="top-1 on held-out answers", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / "depth.png", dpi=110)


def plot_layers() -> None:
    """Tokens per second against decoder layers, SD and SSD, with bootstrap intervals."""
    runs = _runs(json.loads((ENGINE / "layers" / "results.json").read_text(encoding="utf-8")))
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for mode, color in (("sd", "#8a8f98"), ("ssd", "#d9541e")):
        found = [
            (layers, run)
            for name, layers in LAYERS.items()
            for label, run in runs.items()
            if label.startswith(f"{mode} ") and f"/{name}/" in label
        ]
        x, y = [layers for layers, _ in found], [run["tokens_per_second"] for _, run in found]
        spread = [
            [abs(run["tokens_per_second_interval"][side] - run["tokens_per_second"]) for _, run in found]
            for side in (0, 1)
        ]
        axes.errorbar(x, y, yerr=spread, marker="o", capsize=3, color=color, label=mode.upper())
        print(mode, [(layers, round(speed, 1)) for layers, speed in zip(x, y, strict=True)])
    axes.set(
        xlabel="decoder layers of the drafter",
        ylabel="tokens per second",
        xticks=sorted(LAYERS.values()),
        ylim=(0, None),
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / "layers.png", dpi=110)


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    titles = [
        "variant",
        "tau fresh",
        "tau in SSD",
        "hit rate",
        "retention",
        "held-out tau fresh",
        "held-out top-1 at depth 0 1 3 5 10",
    ]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    paths = [path for path in sorted(ENGINE.glob("*/results.json")) if path.parent.name != "layers"]
    everything = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    for name, results in everything.items():
        print(row(name, results))
    if "A" in everything:
        differences(everything, "A")
    plot_depth()
    plot_layers()


if __name__ == "__main__":
    main()
