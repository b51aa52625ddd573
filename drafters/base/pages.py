"""Self-contained HTML reports with tables and inline SVG plots; training and evaluation write them."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2127; background: #fff; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
.sub, .note { color: #5b626c; } .note { font-size: .9rem; max-width: 46rem; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0; }
.card { border: 1px solid #dfe2e6; border-radius: .5rem; padding: .7rem 1.1rem; }
.card b { font-size: 1.7rem; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e7e9ec; white-space: nowrap; }
th { font-weight: 600; font-size: .85rem; } th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
code { background: #f3f4f6; padding: 0 .25rem; }
"""


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """The whole page; `parts` are HTML, empty ones are left out."""
    top = f"<h1>{text(title)}</h1><p class='sub'>{text(subtitle)}</p>"
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{text(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(filter(None, (top, *parts)))
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def section(heading: str, body: str, note: str = "") -> str:
    """A heading, an explanation and HTML."""
    return f"<h2>{text(heading)}</h2>\n" + (f"<p class='note'>{text(note)}</p>" if note else "") + body


def cards(entries: Sequence[tuple[str, str, str]]) -> str:
    """Figures that stand out: each a value, what it is, and a small remark."""
    found = [
        f"<div class='card'><b>{text(value)}</b>{text(what)}<br><span class='sub'>{text(remark)}</span></div>"
        for value, what, remark in entries
    ]
    return f"<div class='cards'>{''.join(found)}</div>" if found else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts, the first column to the left."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def plot(draw: Callable[[Axes], None], height: float = 3.2) -> str:
    """An SVG of what `draw` puts on the axes. The same drawing gives the same text."""
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "pages"}):  # else the names of clip paths are drawn at random
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def number(value: float | None, digits: int) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent, or nothing where there is none."""
    return "" if value is None else f"{value:.0%}"


def text(raw: str) -> str:
    """Escaped for HTML."""
    return html.escape(raw)
