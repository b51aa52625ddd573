"""Draw rounds of a trace, target and draft process side by side: `python -m infer.tracing.plot runs/trace.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from drafters.base.errors import CommandParser, UserError, run_command
from infer.tracing.spans import DRAFTER, TARGET

DESCRIPTION = "Draw some rounds of a trace that --trace of infer.generate or infer.evaluate wrote."
EXAMPLES = "  python -m infer.tracing.plot runs/trace.json --rounds 8:12 --out runs/rounds.png"
COLOURS = {  # in the order of the legend; spans of other names are not drawn
    "prefill": "#9cc3e0",
    "verify": "#2a78b8",
    "wait for the drafter": "#d9541e",
    "look up": "#7b4fa3",
    "draft in sequence": "#e08a2e",
    "glue": "#1b8a6b",
    "select": "#d8b400",
    "tree step": "#7fb53c",
    "send": "#33373d",
    "wait for the target": "#e4e6e9",
}
MARGIN_MS = 1.5  # shown before the first round and after the last


class Drawn(NamedTuple):
    """A span in a lane, in milliseconds."""

    name: str
    start: float
    end: float
    arguments: dict[str, Any]


def main(argv: list[str]) -> int:
    """The command."""
    parser = CommandParser("python -m infer.tracing.plot", DESCRIPTION, EXAMPLES)
    parser.add_argument("trace", metavar="FILE", help="the trace")
    parser.add_argument(
        "--rounds", default="8:12", metavar="A:B", help="the first and the last verification (default: 8:12)"
    )
    parser.add_argument("--out", metavar="FILE", help="a .png or .svg (default: beside the trace, as .png)")
    options = parser.parse_args(argv)
    out = Path(options.out) if options.out else Path(options.trace).with_suffix(".png")
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {out}: give a name that ends in .png or .svg")
    lanes = read_lanes(Path(options.trace))
    figure = draw(lanes, *_window(lanes[TARGET], options.rounds))
    figure.savefig(out, dpi=130)
    print(f"written: {out}")
    return 0


def read_lanes(path: Path) -> dict[str, list[Drawn]]:
    """The spans of each process's main thread by the process's name, in order. Raises `UserError` where there are
    none.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no trace ({error}): give a file that --trace has written") from error
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    side = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "draft-inbox"}
    lanes: dict[str, list[Drawn]] = {name: [] for name in (TARGET, DRAFTER)}
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        if event["ph"] == "X" and (event["pid"], event["tid"]) not in side:
            start, length = event["ts"] / 1000, event["dur"] / 1000
            lanes[names[event["pid"]]].append(Drawn(event["name"], start, start + length, event["args"]))
    return lanes


def _window(target: Sequence[Drawn], rounds: str) -> tuple[float, float]:
    """From the start of one verification to the end of another; they are counted from 1."""
    verifications = [span for span in target if span.name == "verify"]
    first, colon, last = rounds.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last) <= len(verifications)):
        raise UserError(
            f"--rounds {rounds}: give A:B with 1 <= A <= B <= {len(verifications)}, the rounds in the trace"
        )
    return verifications[int(first) - 1].start - MARGIN_MS, verifications[int(last) - 1].end + MARGIN_MS


def draw(lanes: dict[str, list[Drawn]], start: float, end: float) -> Figure:
    """Both lanes between two times, the messages between them as arrows."""
    shown = {
        name: [span for span in spans if span.end > start and span.start < end and span.name in COLOURS]
        for name, spans in lanes.items()
    }
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row, name in enumerate((DRAFTER, TARGET)):
        for span in shown[name]:  # a span within another one follows it and is drawn over it
            left, right = max(span.start, start) - start, min(span.end, end) - start
            axes.barh(row, right - left, left=left, height=0.5, color=COLOURS[span.name], edgecolor="white", lw=0.4)
    for span in shown[TARGET]:
        if span.name == "verify":
            axes.annotate(_label(span), (span.start - start, 1.3), fontsize=8, va="bottom", color="#33373d")
    for tail, head, upwards in _messages(shown):
        _arrow(axes, tail - start, head - start, upwards)
    axes.set_yticks([0, 1], [DRAFTER.replace(" ", "\n"), TARGET])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end - start)
    axes.set_ylim(-0.4, 1.62)
    axes.set_xlabel("milliseconds (arrows: messages)")
    found = {span.name for spans in shown.values() for span in spans}
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in found]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _label(verify: Drawn) -> str:
    """How the outcome before was answered and how many tokens were accepted; of the first request of a batch."""
    found = [next(iter(verify.arguments[name].values())) for name in ("source", "accepted", "drafted")]
    source, accepted, drafted = found
    words = {"hit": "after a hit", "first": "first round", "sync": "", "alone": ""}.get(
        source, f"after a miss ({source})"
    )
    return f"{words}\n{accepted} of {drafted} accepted"


def _messages(shown: dict[str, list[Drawn]]) -> Iterator[tuple[float, float, bool]]:
    """When each message left and when the other side went on with it, and whether it goes up, to the target."""
    for sender, name in ((TARGET, "wait for the target"), (DRAFTER, "wait for the drafter")):
        waits = [span.end for span in shown[DRAFTER if sender == TARGET else TARGET] if span.name == name]
        sends = [span.end for span in shown[sender] if span.name == "send"]
        for sent, next_sent in pairwise([*sends, float("inf")]):
            taken = next((end for end in waits if sent - 0.2 <= end < next_sent), None)
            if taken is not None:
                yield sent, taken, sender == DRAFTER


def _arrow(axes: Axes, tail: float, head: float, upwards: bool) -> None:
    low, high = 0.26, 0.74
    ends = ((head, high), (tail, low)) if upwards else ((head, low), (tail, high))
    axes.annotate(
        "", *ends, arrowprops={"arrowstyle": "-|>", "color": "#33373d", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
