"""Records of a run: metrics.jsonl always, Weights & Biases offline without a network, one line if it cannot start."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drafters.base.settings import build_settings
from train.config import TrainSettings
from train.monitor.metrics import Metrics, flatten

RECORD = {"step": 1, "loss": 2.0, "accuracy": [0.5, 0.4], "heldout": {"lagged": [{"budget": 6, "tau": 1.5}]}}


def settings(output: Path, mode: str) -> TrainSettings:
    recipe = {"target": "t", "output": str(output), "data": {"paths": ["x"]}, "curriculum": [{"steps": 1, "depth": 1}]}
    return build_settings(TrainSettings, {**recipe, "wandb": {"mode": mode}})


def write_one(output: Path, mode: str) -> list[str]:
    said: list[str] = []
    metrics = Metrics(settings(output, mode), output, True, said.append)
    metrics.write(RECORD)
    metrics.close()
    return said


def written(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections to anything but this machine fail, and are noted."""
    tried: list[Any] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
            tried.append(address)
            raise OSError("no network in this test")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return tried


def test_flatten_names_depths_and_budgets() -> None:
    values = {**RECORD, "law": None, "recall": [[0.1, 0.2]], "name": "x", "budgets": ["a"]}
    assert flatten(values) == {
        "step": 1,
        "loss": 2.0,
        "accuracy/00": 0.5,
        "accuracy/01": 0.4,
        "heldout/lagged/budget_6/tau": 1.5,
        "law": None,
        "recall/00/00": 0.1,
        "recall/00/01": 0.2,
        "name": "x",
        "budgets": ["a"],
    }


def test_the_file_is_written_and_a_second_start_appends(tmp_path: Path) -> None:
    assert write_one(tmp_path, "disabled") == [] and write_one(tmp_path, "disabled") == []
    records = written(tmp_path)
    assert ["settings" in record for record in records] == [True, False, True, False]
    assert records[1] == RECORD and records[0]["settings"]["target"] == "t" and "torch" in records[0]["machine"]
    assert not (tmp_path / "wandb").exists()


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(settings(tmp_path / "x", "offline"), tmp_path / "x", False, lambda line: None)
    metrics.write(RECORD)
    metrics.close()
    assert not (tmp_path / "x").exists()


def test_offline_writes_a_run_directory_without_a_network(
    tmp_path: Path, no_network: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "openai", raising=False)  # wandb advertises where another test has imported it
    assert write_one(tmp_path, "offline") == []
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1 and runs[0].stat().st_size > 0 and no_network == []
    deadline = time.monotonic() + 60  # wandb's own process writes the file, on a busy machine after `close`
    while b"accuracy/01" not in runs[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"accuracy/01" in runs[0].read_bytes()
    assert "wandb:" not in capfd.readouterr().err
    name = (tmp_path / "wandb-run-id").read_text().strip()
    assert name and runs[0].name == f"run-{name}.wandb"
    assert written(tmp_path)[1] == RECORD


def test_a_failure_to_start_is_one_line_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.errors import CommError

    def refuses(**options: Any) -> None:
        raise CommError("could not reach\n api.wandb.ai")

    monkeypatch.setattr(wandb, "init", refuses)
    said = write_one(tmp_path, "online")
    assert len(said) == 1 and "\n" not in said[0]
    assert "could not reach api.wandb.ai" in said[0] and "wandb.mode=offline" in said[0]
    assert written(tmp_path)[1] == RECORD and not (tmp_path / "wandb-run-id").exists()
