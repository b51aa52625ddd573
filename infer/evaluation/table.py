"""The figures of a measurement in the terminal: a table of the runs, ratios of speeds, retention and agreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(results: Mapping[str, Any]) -> None:
    """The figures of each run, and the ratios, on stdout."""
    table = Table(title=f"{results['target']['name']}, {results['runs'][0]['prompts']} prompts", title_justify="left")
    for name in ("mode", "tokens/s", "tokens/round", "hit rate", "verify ms", "wait ms"):
        is_label = name == "mode"  # of --beside it is long and takes several lines; the figures keep one
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
            interval = f"95 % interval {kept['low']:.3f} to {kept['high']:.3f}"
            console.print(f"retention of {run['label']}: {kept['value']:.3f} ({interval})")
    for pair in results["agreement"]:
        console.print(f"same tokens {pair['pair']}: {pair['equal']} of {pair['prompts']} prompts")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
