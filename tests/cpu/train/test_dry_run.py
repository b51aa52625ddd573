"""`--dry-run`: the numbers of a recipe without weights, network or data, and what it says where it cannot know."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drafters.base.errors import UserError
from drafters.base.settings import build_settings
from tests.cpu.train.small import TWO_ROWS, packed
from tests.tiny import save_tiny_target, tiny_model
from train.config import TrainSettings
from train.costs.memory import Sharding, peak
from train.costs.plan import flops, products
from train.costs.sizes import target_size
from train.dry_run import LAUNCHES, Launch, count, dry_run, estimate, size, stage_forwards, turn_sizes

ROOT = Path(__file__).parents[3]
H100 = Launch("H100", 1, Sharding.NONE, 0.5)


def recipe(target: str, data: str, row_length: int = 96, **changes: Any) -> TrainSettings:
    content: dict[str, Any] = {
        "target": target,
        "output": "unused",
        "data": {"paths": [data], "row_length": row_length, "heldout_conversations": 6},
        "drafter": {"draft_vocab_size": 32, "num_hidden_layers": 2},
        "curriculum": [
            {"steps": 50, "depth": 1, "anchors_per_row": 8},
            {"steps": 30, "depth": 3, "anchors_per_row": 4},
        ],
        "batch": {"rows_per_step": 4, "rows_per_forward": 2},
        **changes,
    }
    return build_settings(TrainSettings, content)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target without its weights, and conversations."""
    directory = tmp_path_factory.mktemp("plan")
    save_tiny_target(directory / "target")
    (directory / "target" / "model.safetensors").unlink()
    with (directory / "data.jsonl").open("w") as file:
        for number in range(40):
            messages = [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "abcde" * (1 + number % 4)},
            ]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")
    return directory


def test_sizes_come_from_config_json_alone(place: Path) -> None:
    found, model = target_size(str(place / "target"), place / "train.yaml"), tiny_model()
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.multiplied == found.parameters - model.model.embed_tokens.weight.numel()
    (place / "recipe").mkdir()
    (place / "recipe" / "target-config.json").write_bytes((place / "target" / "config.json").read_bytes())
    beside = target_size("owner/on-the-hub", place / "recipe" / "train.yaml")
    assert beside.directory is None and beside[2:] == found[2:]
    with pytest.raises(
        UserError, match=r"'owner/on-the-hub' is not on this machine and there is no .*target-config.json"
    ):
        target_size("owner/on-the-hub", place / "train.yaml")


def test_a_token_meets_only_the_experts_it_visits(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config |= {"moe_intermediate_size": 16, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = target_size(str(tmp_path), tmp_path / "train.yaml")
    experts = 2 * 8 * 3 * 32 * 16
    assert found.parameters - found.multiplied == 64 * 32 + experts * 6 // 8


def test_rows_are_counted_as_training_packs_them(place: Path) -> None:
    settings = recipe(str(place / "target"), str(place / "data.jsonl"))
    plan = estimate(settings, place / "train.yaml", H100)
    assert plan.rows.counted and plan.rows.note.startswith("34 conversations")
    row = packed(TWO_ROWS, 14)
    turns = [turn_sizes(row._replace(turn_ids=row.turn_ids[n], document_ids=row.document_ids[n])) for n in range(2)]  # type: ignore[arg-type]
    assert turns == [[4, 5], [2, 4]]


def test_work_and_time_of_a_stage(place: Path) -> None:
    settings = recipe(str(place / "target"), str(place / "data.jsonl"))
    plan = estimate(settings, place / "train.yaml", H100)
    stage = settings.curriculum[1]
    done = stage_forwards(settings, stage, plan.rows.turns, 1)
    assert all(forward.rows == 2 and forward.anchors == 4 and forward.depth == 3 for forward in done)
    mean = sum(flops(products(plan.config, forward)) for forward in done) / len(done)
    cost = plan.costs[1]
    assert cost.flops == pytest.approx(2 * mean) and cost.seconds == pytest.approx(
        2 * 4 * 2 * LAUNCHES
    )  # two forwards of four steps
    two = estimate(settings, place / "train.yaml", H100._replace(ranks=2)).costs[1]
    assert two.flops == pytest.approx(cost.flops, rel=0.05) and two.seconds == pytest.approx(cost.seconds / 2)
    slow = estimate(settings, place / "train.yaml", H100._replace(share=1e-6)).costs[1]
    assert slow.seconds == pytest.approx(2 * mean / (1e-6 * 989e12))


def test_online_features_cost_a_forward_of_the_target(place: Path) -> None:
    plans = [
        estimate(
            recipe(str(place / "target"), str(place / "data.jsonl"), features={"mode": mode}),
            place / "train.yaml",
            H100,
        )
        for mode in ("offline", "online")
    ]
    more = plans[1].costs[0].flops - plans[0].costs[0].flops
    assert more == pytest.approx(2 * plans[0].target.multiplied * 4 * 96)


def test_the_targets_share_of_a_ranks_memory(place: Path) -> None:
    """Whole beside training; cut over the ranks but for its ends and the layers at work; gone but for its ends once
    features are stored.
    """

    def held(**features: str) -> float:
        settings = recipe(str(place / "target"), str(place / "data.jsonl"), features=features)
        plan = estimate(settings, place / "train.yaml", H100._replace(ranks=4))
        [part] = [part for part in plan.costs[0].parts if part.name == "target"]
        return part.size - 2 * plan.config.draft_vocab_size * plan.config.target_hidden_size

    model = tiny_model()
    size = 2 if recipe("x", "y").dtype == "bfloat16" else 4
    whole, end = (
        size * number for number in (sum(p.numel() for p in model.parameters()), model.lm_head.weight.numel())
    )
    ends = end if model.config.tie_word_embeddings else 2 * end
    assert held(mode="online") == whole and held(mode="offline") == pytest.approx(ends)
    gathered = 2 * (whole - 2 * end) / model.config.num_hidden_layers
    assert held(mode="online", target="sharded") == pytest.approx(whole / 4 + 2 * end + gathered)


def test_more_depth_takes_more_and_recomputation_keeps_less(place: Path) -> None:
    def peaks(recompute: bool) -> list[float]:
        stages = [{"steps": 1, "depth": depth} for depth in (1, 4, 8)]
        settings = recipe("owner/name", "no-such-data", curriculum=stages, loss={"recompute": recompute})
        return [peak(cost.parts) for cost in estimate(settings, place / "recipe2" / "train.yaml", H100).costs]

    (place / "recipe2").mkdir()
    (place / "recipe2" / "target-config.json").write_bytes((place / "target" / "config.json").read_bytes())
    kept, again = peaks(False), peaks(True)
    assert kept == sorted(kept) and kept[2] - kept[1] > 3 * (again[2] - again[1]) > 0


def test_the_shipped_recipe_is_planned_without_a_download(tmp_path: Path) -> None:
    """In a process without a network, a cache or data: what stands in the repository is enough."""
    command = [
        sys.executable,
        str(ROOT / "train" / "eagle3_selfcond.py"),
        "--config",
        str(ROOT / "recipes/smollm2-135m/train.yaml"),
    ]
    environment = {"SSD_DRAFTERS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment |= {"PATH": "", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--dry-run"], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "135M parameters, 269.0 MB" in done.stdout and "9.81M parameters trained, 28.3M frozen" in done.stdout
    assert "Expected hours on 1 x H100 at 40% of 989TFLOP/s" in done.stdout
    assert list(tmp_path.iterdir()) == [] or not list(tmp_path.rglob("*.safetensors"))


def test_a_mistyped_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from drafters.base.errors import run_command
    from train.eagle3_selfcond import main

    arguments = ["--config", str(ROOT / "recipes/smollm2-135m/train.yaml"), "--dry-run"]
    mistakes = {"--gpu=H10": "did you mean 'H100'", "--ranks=0": "--ranks = 0", "--launch=none.yaml": "no such file"}
    for wrong, said in mistakes.items():
        assert run_command(main, [*arguments, wrong]) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1


def test_what_does_not_fit_is_said(place: Path) -> None:
    settings = recipe(str(place / "target"), str(place / "data.jsonl"), features={"max_gigabytes": 1e-6})
    screen = io.StringIO()
    dry_run(settings, place / "train.yaml", H100, Console(file=screen, width=200))
    text = screen.getvalue()
    assert "training asks first" in text and "Does not fit" not in text and re.search(r"peak +│ +6\d\d\.\d MB", text)
    wide = recipe(str(place / "target"), "none", row_length=100000)
    plan_text = io.StringIO()
    dry_run(wide, place / "train.yaml", H100._replace(device="L4"), Console(file=plan_text, width=200))
    assert "Does not fit" in plan_text.getvalue() and "loss.recompute=true" in plan_text.getvalue()
    with pytest.raises(UserError, match="cannot be shared by 3 ranks"):
        estimate(settings, place / "train.yaml", H100._replace(ranks=3))


def test_numbers_in_words() -> None:
    assert [count(n) for n in (999, 20_400_000, 134_515_008, 2.5e15)] == ["999", "20.4M", "135M", "2.5P"]
    assert [size(n) for n in (2.5e6, 3.21e9)] == ["2.5 MB", "3.21 GB"]
