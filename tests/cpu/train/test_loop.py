"""The loop: data order, learning rate, a resumed run that equals an uninterrupted one bit for bit, one process and two."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.settings import build_settings
from drafters.targets import load_target
from tests.tiny import save_tiny_target
from train.config import TrainSettings
from train.console import Console
from train.loop import train
from train.prepare import prepare, split
from train.schedule import learning_rate, rows_of_step
from train.state import Progress, complete_states, load_state, save_state

ENTRY = Path(__file__).parents[3] / "train" / "eagle3_selfcond.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and conversations for it."""
    directory = tmp_path_factory.mktemp("train")
    save_tiny_target(directory / "target")
    draw = random.Random(0)
    with (directory / "data.jsonl").open("w") as file:
        for number in range(40):
            answer = "".join(draw.choice("abc ") for _ in range(draw.randint(10, 30)))
            messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")
    return directory


def recipe(place: Path, output: str, **changes: Any) -> dict[str, Any]:
    return {
        "target": str(place / "target"),
        "output": str(place / output),
        "dtype": "float32",
        "data": {"paths": [str(place / "data.jsonl")], "row_length": 96, "heldout_conversations": 6},
        "features": {"directory": str(place / "features"), "rows_per_shard": 8},
        "drafter": {"draft_vocab_size": 32, "num_hidden_layers": 2},
        "optimizer": {"lr": 2e-3, "warmup_steps": 3},
        "curriculum": [{"steps": 5, "depth": 1, "anchors_per_row": 8}, {"steps": 3, "depth": 3, "anchors_per_row": 4}],
        "batch": {"rows_per_step": 4, "rows_per_forward": 2},
        "heldout": {"every": 100, "lookahead": 2, "budgets": [6], "max_rows": 2},
        "checkpoint": {"every": 100},
        **changes,
    }


def run(place: Path, output: str, **changes: Any) -> Path:
    settings = build_settings(TrainSettings, recipe(place, output, **changes))
    console = Console(speaks=False)
    return train(settings, prepare(settings, "cpu", True, console.say, console.show), console)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights in the newest state."""
    state = torch.load(complete_states(directory / "states")[-1] / "state.pt", weights_only=True)
    return state["model"] | {f"{k}.{n}": v for k, s in state["optimizer"]["state"].items() for n, v in s.items()}


def losses(directory: Path) -> list[float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"depth_weights": "visited", "bonus": 0.5, "serving": {"lookahead": 2}}  # weights come from what the run has measured
    run(place, "whole", loss=loss)
    import train.loop as loop

    real_step = loop.train_step

    def stops_after_four(run: Any, progress: Progress, wants_stop: bool) -> Any:
        return real_step(run, progress, wants_stop or progress.step == 3)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stops_after_four)
        run(place, "parts", loss=loss)
    assert [state.name for state in complete_states(place / "parts" / "states")] == ["step-0000004"]
    run(place, "parts", loss=loss)

    assert losses(place / "parts") == losses(place / "whole") and len(losses(place / "whole")) == 8
    one, two = weights(place / "whole"), weights(place / "parts")
    assert one.keys() == two.keys() and len(one) > 50
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_result_is_a_drafter_with_a_card(place: Path) -> None:
    directory = run(place, "card", curriculum=[{"steps": 6, "depth": 3}])
    target = load_target(str(place / "target"), "float32")
    loaded = load_drafter(directory, target.facts, target.embed_weight)
    assert loaded.warnings == [] and loaded.config.num_hidden_layers == 2
    card = loaded.card
    assert (card.trained_depth, card.lookahead, card.trained_length) == (4, 2, 96)
    assert card.training["steps"] == 6 and card.data["conversations"] == 34
    assert len(card.heldout["accuracy"]) == 7 and card.heldout["lagged"][0]["budget"] == 6
    first, *_, last = losses(place / "card")
    assert last < first
    step = json.loads((place / "card" / "metrics.jsonl").read_text().splitlines()[1])
    assert 0 < step["utilisation"] < 1 and step["tokens_per_second"] > 0 and step["grad_norm"] > 0
    assert "<h2>Held-out: by depth</h2>" in (place / "card" / "report.html").read_text()


def test_going_on_from_a_drafter(place: Path) -> None:
    directory = run(place, "first", curriculum=[{"steps": 6, "depth": 1}])
    again = run(place, "second", curriculum=[{"steps": 2, "depth": 1}], drafter={"init": str(directory)})
    assert losses(again.parent)[0] < losses(directory.parent)[0]
    with pytest.raises(UserError, match=r"drafter.num_hidden_layers = 3, but .* has 2"):
        run(place, "third", drafter={"init": str(directory), "num_hidden_layers": 3})


def test_a_state_of_another_run_is_refused(place: Path) -> None:
    run(place, "other", curriculum=[{"steps": 2, "depth": 0}])
    with pytest.raises(UserError, match="belongs to a run with another"):
        run(place, "other", curriculum=[{"steps": 3, "depth": 0}], seed=1)


def test_online_and_offline_features_train_alike(place: Path) -> None:
    for mode in ("online", "offline"):
        run(place, mode, curriculum=[{"steps": 2, "depth": 1}], features={"mode": mode, "directory": str(place / "features")})
    assert losses(place / "online") == pytest.approx(losses(place / "offline"), rel=1e-5)


def test_each_epoch_takes_every_row_once() -> None:
    places = [row for step in range(7) for row in rows_of_step(step, 4, 14, seed=3)]
    first, second = Counter(places[:14]), Counter(places[14:28])
    assert first == second == Counter(range(14)) and places[:14] != places[14:28]


def test_learning_rate_warms_up_and_falls_to_its_end(place: Path) -> None:
    settings = build_settings(TrainSettings, recipe(place, "x"))
    rates = [learning_rate(settings, step) / 2e-3 for step in range(8)]
    assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert rates[-1] == pytest.approx(0.05) and rates[3:] == sorted(rates[3:], reverse=True)


def test_the_same_question_is_never_on_both_sides(place: Path) -> None:
    from data.conversations import Conversation

    asked = [
        Conversation(str(i), ({"role": "user", "content": f"q{i % 10}"}, {"role": "assistant", "content": "a"}), False, "x")
        for i in range(40)
    ]
    kept, heldout = split(asked, 5)
    questions = [{c.messages[0]["content"] for c in part} for part in (kept, heldout)]
    assert not questions[0] & questions[1] and len(heldout) == 8 and len(kept) == 32


def test_states_are_whole_and_few(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (9, 10, 100):
        save_state(tmp_path, model, optimizer, Progress(step, 0.5), "key", keep=2)
    (tmp_path / "step-0000200").mkdir()  # interrupted before its file was there
    newest = complete_states(tmp_path)
    assert [state.name for state in newest] == ["step-0000010", "step-0000100"]
    assert load_state(newest[-1], model, optimizer, "key") == Progress(100, 0.5)


def command(arguments: list[str], launcher: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, str(ENTRY), *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_command_line_mistakes_get_one_line(tmp_path: Path) -> None:
    done = command(["--config", str(tmp_path / "none.yaml")], [sys.executable])
    assert done.returncode == 2 and done.stderr.startswith("error: no such file") and len(done.stderr.splitlines()) == 1
    (tmp_path / "r.yaml").write_text("target: x\noutput: y\ndata: {paths: [z]}\ncurriculum: [{steps: 1, depth: 1}]\n")
    done = command(["--config", str(tmp_path / "r.yaml"), "optimiser.lr=1"], [sys.executable])
    assert done.returncode == 2 and "did you mean 'optimizer'" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_two_processes_train_as_one_does(place: Path) -> None:
    """`accelerate launch` with one and with two CPU processes: the same losses, so the same gradients."""
    import yaml

    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    for processes in (1, 2):
        (place / "r.yaml").write_text(yaml.safe_dump(recipe(place, f"with-{processes}")))
        several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
        launcher = [*launch, "--num_processes", str(processes), *several]
        done = command(["--config", str(place / "r.yaml"), "--debug"], launcher, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"training in {processes} process" in done.stdout + done.stderr
    assert losses(place / "with-1") == pytest.approx(losses(place / "with-2"), rel=1e-4)
    one, two = weights(place / "with-1"), weights(place / "with-2")
    assert all(torch.allclose(one[name], two[name], rtol=1e-2, atol=1e-4) for name in one)


def test_a_launch_that_started_one_process_of_two_is_refused(place: Path) -> None:
    """`accelerate launch --cpu --num_processes 2` sets the meeting point, and starts one process without a rank."""
    import yaml

    (place / "r.yaml").write_text(yaml.safe_dump(recipe(place, "alone")))
    done = command(["--config", str(place / "r.yaml")], [sys.executable], MASTER_ADDR="127.0.0.1")
    assert done.returncode == 2 and "starts one process only" in done.stderr
