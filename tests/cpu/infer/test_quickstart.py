"""Quickstart without the real model: valid commands, reuse of a finished training, the message of a failed one."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from drafters.base.errors import UserError, run_command
from drafters.base.settings import load_settings
from infer import evaluate, generate, quickstart, serve
from infer.config import EngineSettings
from train.config import TrainSettings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped = tmp_path / "shipped-eagle3"
    shipped.mkdir()
    (shipped / "config.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    monkeypatch.setattr(quickstart, "SHIPPED", str(shipped))


def test_the_training_command_is_one_that_training_understands() -> None:
    command = quickstart.training_command(Path("runs/x"), 4.0)
    script = command.index("train/eagle3_selfcond.py")
    assert Path(command[script]).is_file()
    option, recipe, *overrides = command[script + 1 :]
    settings = load_settings(TrainSettings, recipe, overrides)
    assert option == "--config"
    assert (settings.output, settings.minutes) == ("runs/x/train", 4.0)
    assert settings.drafter.num_hidden_layers == 2  # the shipped drafter's, whatever the recipe would make
    assert settings.target == quickstart.TARGET


def test_the_commands_for_afterwards_are_understood() -> None:
    lines = quickstart.what_next(Path("runs/x/train/best-eagle3"), Path("runs/x")).splitlines()
    for parse, name in ((generate.parse, "infer.generate"), (serve.parse, "infer.serve")):
        words = shlex.split(next(line for line in lines if name in line))
        options = parse(words[words.index(name) + 1 :])
        settings = load_settings(EngineSettings, options.recipe, options.overrides)
        assert settings.drafter == "runs/x/train/best-eagle3"


def test_measuring_plans_three_runs_of_the_new_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def only_plan(argv: list[str]) -> int:
        seen.append((evaluate.parse(argv), evaluate.plan_runs(evaluate.parse(argv))))
        return 0

    monkeypatch.setattr(evaluate, "main", only_plan)
    assert quickstart.measure(Path("runs/x/best-eagle3"), Path("runs/x"), 12, 96) == 0
    options, runs = seen[0]
    assert [run.label for run in runs] == ["ar", "sd", "ssd"]
    assert {run.settings.drafter for run in runs} == {"runs/x/best-eagle3"}
    assert (options.num_prompts, options.max_new_tokens, options.out) == (12, 96, "runs/x")
    assert all(Path(path).is_file() for path in options.prompts)


def trained(out: Path) -> None:
    for name in ("best-eagle3", "final-eagle3"):
        (out / "train" / name).mkdir(parents=True)


def test_a_finished_training_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("trained again"))
    assert quickstart.fine_tuned_drafter(tmp_path, 4.0) == tmp_path / "train" / "best-eagle3"


def test_an_unfinished_training_goes_on_and_a_failed_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        if len(commands) == 2:
            trained(tmp_path)
        return subprocess.CompletedProcess(command, 1 if len(commands) == 1 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match="training ended with status 1"):
        quickstart.fine_tuned_drafter(tmp_path, 4.0)
    assert quickstart.fine_tuned_drafter(tmp_path, 4.0).is_dir()
    assert commands[0] == commands[1] == quickstart.training_command(tmp_path, 4.0)


def test_elsewhere_it_says_where_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(quickstart.main, []) == 2
    assert "at the root of a complete checkout" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve", "evaluate"])
def test_the_shipped_recipes_are_valid(name: str) -> None:
    recipe = f"recipes/smollm2-135m/{name}.yaml"
    runs = evaluate.plan_runs(evaluate.parse(["--recipe", recipe, "--prompts", "p.jsonl", "--out", "o"]))
    assert {run.settings.target for run in runs} == {"builtin:smollm2-135m"}
