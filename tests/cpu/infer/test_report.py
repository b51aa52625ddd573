"""The page: complete, self-contained, escaped, and drawn from whatever runs there are."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from drafters.base.errors import run_command
from infer import report

KEPT = {"value": 0.931, "low": 0.904, "high": 0.957}


def run_of(mode: str, speed: float, **other: Any) -> dict[str, Any]:
    spread = {"p50": 16.0, "p90": 18.0}
    return {
        "label": mode,
        "mode": mode,
        "settings": {"lookahead": 4, "dtype": "bfloat16", "target_devices": ["cpu:0"], "kv_tokens": None},
        "prompts": 24,
        "new_tokens": 2400,
        "seconds": 2400 / speed,
        "prefill_seconds": 3.0,
        "tokens_per_second": speed,
        "tokens_per_second_interval": [0.95 * speed, 1.05 * speed],
        "tokens_per_round": 2.0,
        "acceptance_by_position": [0.7, 0.6, None],
        "hit_rate": None,
        "tokens_per_round_hit": None,
        "tokens_per_round_miss": None,
        "exposed_share": None,
        "retention": None,
        "verify_ms": spread,
        "draft_ms": spread,
        "wait_ms": None,
        "round_ms": {"mean": 20.0, "verify": 16.0, "drafting": 3.0, "other": 1.0},
        **other,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "machine": {"cpu": "A <b>CPU</b>", "torch": "2.13.0", "transformers": "5.24.0"},
        "target": {"name": "target<script>"},
        "arguments": {"max_new_tokens": 128, "temperature": 0.0},
        "runs": [
            run_of("ar", 50.0, acceptance_by_position=[], tokens_per_round=1.0),
            run_of("sd", 80.0),
            run_of(
                "ssd",
                103.4,
                hit_rate=0.71,
                tokens_per_round_hit=2.4,
                tokens_per_round_miss=1.6,
                exposed_share=0.04,
                retention=KEPT,
            ),
        ],
        "ratios": {"ssd/ar": 2.07},
        "ratio_intervals": {"ssd/ar": {"value": 2.07, "low": 1.91, "high": 2.22}, "ssd/sd": None},
        "agreement": [
            {"pair": "ar/ssd", "prompts": 24, "equal": 22, "partings": [{"margin": 0.0625}, {"margin": None}]}
        ],
        "prediction": {
            "times_ms": {"verify": 16.0},
            "ratios": {"ssd/ar": {"predicted": 2.2, "measured": 2.07, "share": 0.94}},
        },
    }


class Tags(HTMLParser):
    """Fails on tags that are not closed in order, and collects what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(results: dict[str, Any], tmp_path: Path) -> str:
    return report.write_report(results, tmp_path).read_text(encoding="utf-8")


def test_the_page_is_well_formed_self_contained_and_escaped(results: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(results, tmp_path)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert not re.search(r"url\((?!#)", page)
    assert "<script" not in page
    assert "target&lt;script&gt;" in page
    assert "A &lt;b&gt;CPU&lt;/b&gt;" in page
    assert page.count("<svg") == 4


def test_the_page_tells_the_figures(results: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(results, tmp_path)
    for figure in ("2.07x", "1.91 to 2.22", "103.4", "71%", "4%", "22 of 24", "0.062", "94%", "cpu:0"):
        assert figure in page, figure


def test_results_with_the_old_name_of_the_exposed_share_are_read(results: dict[str, Any], tmp_path: Path) -> None:
    expected = page_of(results, tmp_path)
    for run in results["runs"]:
        run["hidden"] = run.pop("exposed_share")
    assert page_of(results, tmp_path) == expected


def test_plots_are_files_too(results: dict[str, Any], tmp_path: Path) -> None:
    page_of(results, tmp_path)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "acceptance.svg",
        "hits.svg",
        "round.svg",
        "speed.svg",
    ]
    assert all(path.read_text(encoding="utf-8").startswith("<svg") for path in (tmp_path / "plots").iterdir())


def test_one_mode_alone_makes_a_page_without_what_it_has_not(results: dict[str, Any], tmp_path: Path) -> None:
    only = copy.deepcopy(results) | {"ratios": {}, "ratio_intervals": {}, "agreement": [], "prediction": None}
    only["runs"] = only["runs"][:1]
    page = page_of(only, tmp_path)
    assert page.count("<svg") == 2
    assert "Predicted and measured" not in page


def test_runs_without_any_round_make_a_page(results: dict[str, Any], tmp_path: Path) -> None:
    nothing = {
        "tokens_per_second": None,
        "tokens_per_second_interval": None,
        "tokens_per_round": None,
        "verify_ms": None,
        "round_ms": None,
    }
    results["runs"] = [run_of("ar", 1.0, acceptance_by_position=[], **nothing)]
    results["ratio_intervals"] = {}
    assert page_of(results, tmp_path).count("<svg") == 0


def test_the_command_writes_the_page_again(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    assert run_command(report.main, [str(path)]) == 0
    assert (tmp_path / "report.html").is_file()
    for content, message in (("{}", "is no results.json"), ("{", "is no results.json")):
        path.write_text(content, encoding="utf-8")
        assert run_command(report.main, [str(path)]) == 2
        assert message in capsys.readouterr().err
    assert run_command(report.main, [str(tmp_path / "none.json")]) == 2
