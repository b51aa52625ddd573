"""The loop: data order, learning rate, a resumed run that equals an uninterrupted one bit for bit, one process and
two.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from drafters.base.errors import UserError
from drafters.base.settings import build_settings
from drafters.eagle3_ssd.card import read_card
from drafters.eagle3_ssd.checkpoint import load_drafter
from drafters.targets.target import load_target
from tests.cpu.train.runs import command, losses, make_place, recipe, run, weights
from train.config import TrainSettings
from train.monitor.console import Console
from train.parallel.launch import rank
from train.trainer.feature_sources import Caller
from train.trainer.prepare import prepare
from train.trainer.schedule import learning_rate, rows_of_step
from train.trainer.state import Progress, states
from train.trainer.training_data import split


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("train"))


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"depth_weights": "visited", "bonus": 0.5}  # weights and rounds come from what the run has measured
    stages = [
        {"steps": 3, "depth": 3, "anchors_per_row": 8},
        {"steps": 5, "depth": 6, "anchors_per_row": 4, "replay": True},
    ]
    run(place, "whole", loss=loss, curriculum=stages)
    import train.trainer.loop as loop

    real_step = loop.train_step

    def stops_after_four(run: Any, progress: Progress, interrupted: bool, out_of_time: bool) -> Any:
        return real_step(run, progress, interrupted or progress.step == 3, out_of_time)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stops_after_four)
        run(place, "parts", loss=loss, curriculum=stages)
    assert [state.name for state in states(place / "parts" / "states")] == ["step-0000004.safetensors"]
    assert not (place / "parts" / "final-eagle3").exists()
    run(place, "parts", loss=loss, curriculum=stages)

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
    assert len(card.heldout["accuracy"]) == 5 and card.heldout["lagged"][0]["budget"] == 6
    first, *_, last = losses(place / "card")
    assert last < first
    step = json.loads((place / "card" / "metrics.jsonl").read_text().splitlines()[1])
    assert 0 < step["utilisation"] < 1 and step["tokens_per_second"] > 0 and step["grad_norm"] > 0
    assert "<h2>Held-out: by depth</h2>" in (place / "card" / "report.html").read_text()


def test_the_best_drafter_is_the_fastest_not_the_one_with_the_lowest_loss(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8: the loss goes on falling while tokens per round fall."""
    import train.validation.heldout as heldout

    measured: list[heldout.HeldoutFigures] = []

    def speed(figures: heldout.HeldoutFigures) -> float:
        if all(figures is not other for other in measured):
            measured.append(figures)
        return [1.2, 1.5, 1.1][next(i for i, other in enumerate(measured) if other is figures)]

    monkeypatch.setattr(heldout.HeldoutFigures, "speed", property(speed))
    often = {"every": 2, "lookahead": 2, "budgets": [6], "max_rows": 2}
    directory = run(place, "best", curriculum=[{"steps": 6, "depth": 1}], heldout=often)
    best, final = (read_card(directory.parent / name) for name in ("best-eagle3", "final-eagle3"))
    assert (best.training["steps"], final.training["steps"]) == (4, 6)
    assert final.heldout["loss"][0] < best.heldout["loss"][0]


def test_patience_ends_a_run_that_gets_no_better(place: Path) -> None:
    """At a learning rate that changes nothing, the first measurement is the best: two more, and the run ends, for
    good.
    """
    changes = {"curriculum": [{"steps": 20, "depth": 1}], "optimizer": {"lr": 1e-12}}
    heldout = {"every": 2, "lookahead": 2, "budgets": [6], "max_rows": 2, "patience": 2}
    directory = run(place, "patient", heldout=heldout, **changes)
    assert (directory / "model.safetensors").is_file() and len(losses(place / "patient")) == 6
    run(place, "patient", heldout=heldout, **changes)
    assert len(losses(place / "patient")) == 6, "the second time it only says so"
    assert len(losses(run(place, "patient", heldout={**heldout, "patience": 3}, **changes).parent)) == 8


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
        run(
            place,
            mode,
            curriculum=[{"steps": 2, "depth": 1}],
            features={"mode": mode, "directory": str(place / "features")},
        )
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
    from data.chat.conversations import Conversation

    asked = [
        Conversation(
            str(i), ({"role": "user", "content": f"q{i % 10}"}, {"role": "assistant", "content": "a"}), False, "x"
        )
        for i in range(40)
    ]
    kept, heldout = split(asked, 5)
    questions = [{c.messages[0]["content"] for c in part} for part in (kept, heldout)]
    assert not questions[0] & questions[1] and len(heldout) == 8 and len(kept) == 32


def test_command_line_mistakes_get_one_line(tmp_path: Path) -> None:
    done = command(["--config", str(tmp_path / "none.yaml")], [sys.executable])
    assert (
        done.returncode == 2 and done.stderr.startswith("error: no such file") and len(done.stderr.splitlines()) == 1
    )
    (tmp_path / "r.yaml").write_text("target: x\noutput: y\ndata: {paths: [z]}\ncurriculum: [{steps: 1, depth: 1}]\n")
    done = command(["--config", str(tmp_path / "r.yaml"), "optimiser.lr=1"], [sys.executable])
    assert done.returncode == 2 and "did you mean 'optimizer'" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_two_processes_train_as_one_does(place: Path) -> None:
    """`accelerate launch` with one and with two CPU processes: the same losses, so the same gradients."""
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
    (place / "r.yaml").write_text(yaml.safe_dump(recipe(place, "alone")))
    done = command(["--config", str(place / "r.yaml")], [sys.executable], MASTER_ADDR="127.0.0.1")
    assert done.returncode == 2 and "starts one process only" in done.stderr


def test_another_seed_reads_the_features_there_are_and_is_measured_on_the_same_rows(place: Path) -> None:
    prepared = []
    for seed in (0, 5):
        settings = build_settings(
            TrainSettings, recipe(place, "seeds", seed=seed, features={"directory": str(place / "seeds")})
        )
        console = Console(speaks=False)
        prepared.append(prepare(settings, Caller("cpu", rank(), False, console.say, console.show)))
    assert len(list((place / "seeds").glob("*/index.json"))) == 2  # to train and to measure on
    for one, other in ((getattr(each, part) for each in prepared) for part in ("training", "heldout")):
        assert len(one) == len(other)
        assert all(torch.equal(one.batch([i]).token_ids, other.batch([i]).token_ids) for i in range(len(one)))
