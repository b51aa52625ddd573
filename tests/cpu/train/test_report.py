"""The page of a run: drawn from whatever records there are, a repeated step once, nothing fetched, text escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafters.base.errors import run_command
from train import report


def step_of(step: int, loss: float, depth: int = 2) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "accuracy": [0.5 - 0.1 * d for d in range(depth + 1)],
        "depth": depth,
        "lr": 1e-3 / step,
        "grad_norm": 1.0,
        "tokens_per_second": 100.0 + step,
        "utilisation": 0.5,
    }


def heldout_of(step: int, speed: float) -> dict[str, Any]:
    lagged = [{"budget": budget, "tau": 1.4, "hit_rate": 0.6, "retention": 0.9} for budget in (6, 12)]
    values = {
        "accuracy": [0.5, 0.4],
        "acceptance": [0.45, 0.35],
        "loss": [3.0, 3.5],
        "tau_fresh": 1.7,
        "lagged": lagged,
    }
    return {"step": step, "heldout": {**values, "predicted_speed": speed}}


def lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def test_a_step_done_again_counts_once_and_a_cut_line_is_left_out() -> None:
    written = lines(
        {"settings": {"seed": 1}}, step_of(1, 5.0), step_of(2, 9.0), {"settings": {"seed": 2}}, step_of(2, 4.0)
    )
    history = report.read_history([*written, '{"step": 3, "lo'])
    assert [(s["step"], s["loss"]) for s in history.steps] == [(1, 5.0), (2, 4.0)]
    assert history.start == {"settings": {"seed": 2}}


def test_smoothing_looks_back_only() -> None:
    values = [float(v) for v in range(100)]
    smoothed = report.smooth(values, share=0.04)
    assert (
        smoothed[0] == 0.0 and smoothed[1] == 0.5 and smoothed[99] == (96 + 97 + 98 + 99) / 4 and len(smoothed) == 100
    )
    assert report.smooth([3.0, 1.0]) == [3.0, 1.0]


def test_the_page_shows_every_section_and_fetches_nothing(tmp_path: Path) -> None:
    records = [
        {"settings": {"target": "<x>", "loss": {"cross_entropy": 1.0}}},
        *(step_of(s, 9.0 / s, depth=1 + s // 4) for s in range(1, 8)),
    ]
    records += [heldout_of(3, 1.2), heldout_of(7, 1.1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines(*records)))
    page = report.write_report(tmp_path).read_text()
    for heading, _, _ in report.SECTIONS:
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<svg") == len(report.SECTIONS)
    assert "1.20x" in page and "best, at step 3" in page and "&lt;x&gt;" in page and "<x>" not in page
    assert "loss/cross_entropy" in page and "hit rate, budget 12" in page
    assert "<script" not in page and "src=" not in page and 'href="http' not in page


def test_a_run_of_one_step_without_measurements_has_a_page() -> None:
    page = report.render("x", report.read_history(lines(step_of(1, 5.0))))
    assert page.count("<svg") == 6 and "Held-out" not in page


def test_a_directory_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(report.main, [str(tmp_path)]) == 2
    assert "metrics.jsonl is not there" in capsys.readouterr().err
