"""Every recipe is whole: its files validate, agree with each other, and the sizes they state follow from the target's
figures.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from data import synthesize
from drafters.base.errors import UserError
from drafters.base.serving import ServingSettings
from drafters.base.settings import build_settings, load_settings
from drafters.eagle3_ssd.config import default_taps
from drafters.eagle3_ssd.rope import scaling_of_target
from infer.config import EngineSettings, Mode
from infer.evaluate import parse, plan_runs
from infer.recipe import load_engine_settings
from train.config import HeldoutSettings, LossSettings, TrainSettings

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
GPU_TARGETS = {
    "llama3.1-8b": 8.030e9,
    "llama3.3-70b": 70.554e9,
    "qwen3-8b": 8.191e9,
    "qwen3-32b": 32.762e9,
}  # published parameter counts
NAMES = [*GPU_TARGETS, "smollm2-135m"]
BANDWIDTH = 0.75 * 3.35e12  # bytes a second that an H100's weights are read at
REDUCES, LAUNCHES = 50e-6, 50e-6  # seconds a layer: two all-reduces over NVLink; kernel launches of a drafter layer


def figures(name: str) -> dict[str, Any]:
    return json.loads((RECIPES / name / "target-config.json").read_text())


def transformers_config(name: str) -> Any:
    content = figures(name)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def layer_parameters(config: Any, inputs: int = 1) -> int:
    """Matrix weights of a decoder layer whose attention reads `inputs` hidden states side by side."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return inputs * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size


def settings_of(name: str) -> tuple[TrainSettings, EngineSettings]:
    return load_settings(TrainSettings, RECIPES / name / "train.yaml"), load_settings(
        EngineSettings, RECIPES / name / "serve.yaml"
    )


def test_no_recipe_is_forgotten() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/train.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_files_validate_and_agree(name: str) -> None:
    train, serve = settings_of(name)
    arguments = ["--recipe", str(RECIPES / name / "evaluate.yaml"), "--prompts", "p.jsonl", "--out", "runs/x"]
    runs = plan_runs(parse(arguments))
    assert [run.mode for run in runs] == ["ar", "sd", "ssd"]
    for settings in (serve, runs[-1].settings):
        assert settings.template == train.data.template, "thinking or not has to be what was trained"
        assert (
            settings.target == train.target
            and settings.lookahead == serve.lookahead
            and settings.budget == serve.budget
        )
        assert not set(settings.target_devices) & set(settings.draft_devices)
        if name in GPU_TARGETS:
            assert settings.drafter == f"{train.output}/best-eagle3"
            assert train.serving.model_dump() == settings.model_dump(include=set(ServingSettings.model_fields))
    assert max(stage.depth for stage in train.curriculum) >= 2 * serve.lookahead + 1
    for file in ("train", "serve", "evaluate"):
        assert f"recipes/{name}/{file}.yaml" in (RECIPES / name / f"{file}.yaml").read_text(), (
            "the command stands on top"
        )


# What the recipes said before they had a `serving:` block: loss, held-out and serving each for itself.
GPU_LOSS = {"kl": 1.0, "depth_weights": "visited", "serving": {"lookahead": 5, "fan_out": 6}, "recompute": True}
GPU_HELDOUT = {"every": 500, "lookahead": 5, "budgets": [18, 36, 72], "max_rows": 64}
OLD_LOSS: dict[str, dict[str, Any]] = {name: GPU_LOSS for name in GPU_TARGETS} | {
    "smollm2-135m": {
        "kl": 1.0,
        "acceptance": 1.0,
        "bonus": 0.3,
        "depth_weights": "visited",
        "serving": {"lookahead": 5, "fan_out": 4},
    },
}
OLD_HELDOUT: dict[str, dict[str, Any]] = {name: GPU_HELDOUT for name in GPU_TARGETS} | {
    "smollm2-135m": {"every": 1500, "lookahead": 5, "budgets": [6, 12, 24], "max_rows": 32},
}
OLD_SERVE: dict[str, dict[str, Any]] = {name: {"lookahead": 5, "budget": 36} for name in GPU_TARGETS} | {
    "smollm2-135m": {"lookahead": 4, "budget": 80, "fallback_lookahead": 2},
}
OLD_SD_LOOKAHEAD = {name: 4 for name in GPU_TARGETS} | {"smollm2-135m": 3}


@pytest.mark.parametrize("name", NAMES)
def test_old_forms_of_training_recipes_load_to_the_same_settings(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = yaml.safe_load((RECIPES / name / "train.yaml").read_text())
    del content["serving"]
    old = tmp_path / "train.yaml"
    old.write_text(yaml.safe_dump(content | {"loss": OLD_LOSS[name], "heldout": OLD_HELDOUT[name]}))
    with caplog.at_level("WARNING"):
        loaded = load_settings(TrainSettings, old)
    shipped, _ = settings_of(name)
    apart = {"serving": {"budget"}}  # nothing said it before; loss and held-out figures say what followed from it
    assert loaded.model_dump(exclude=apart) == shipped.model_dump(exclude=apart)
    assert shipped.loss.fan_out == OLD_LOSS[name]["serving"]["fan_out"]
    assert any("'loss.kl' is now called 'loss.cross_entropy'" in message for message in caplog.messages)
    assert any("'loss.serving.lookahead' is now called 'serving.lookahead'" in message for message in caplog.messages)


@pytest.mark.parametrize("name", NAMES)
def test_serving_recipes_take_the_block_and_the_short_names(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in ("serve.yaml", "evaluate.yaml"):
        content = yaml.safe_load((RECIPES / name / file).read_text())
        del content["serving"]
        if file == "evaluate.yaml":
            content["modes"] = {"sd": {"lookahead": OLD_SD_LOOKAHEAD[name]}}
        old = tmp_path / file
        old.write_text(yaml.safe_dump(content | OLD_SERVE[name]))
        for mode in Mode:
            for overrides in ([], ["lookahead=7"], ["serving.lookahead=7"]):
                loaded, shipped = (load_engine_settings(str(p), mode, overrides) for p in (old, RECIPES / name / file))
                assert loaded == shipped
                assert not overrides or shipped.lookahead == 7
    assert not caplog.messages


def test_old_recipes_keep_the_defaults_that_went_with_their_names() -> None:
    """K of the loss, K of the held-out figures and F were three numbers: giving one left the others."""
    rest = {"target": "t", "output": "o", "data": {"paths": ["p"]}, "curriculum": [{"steps": 1, "depth": 1}]}
    old = build_settings(TrainSettings, rest | {"loss": {"serving": {"lookahead": 3, "refresh": 1}}})
    assert (old.serving.lookahead, old.loss.fan_out, old.heldout.lookahead, old.heldout.refresh) == (3, 4, 5, (0,))
    old = build_settings(TrainSettings, rest | {"heldout": {"lookahead": 3}})
    assert (old.serving.lookahead, old.loss.fan_out, old.heldout.lookahead) == (5, 4, 3)
    plain = build_settings(TrainSettings, rest)
    assert (plain.loss, plain.heldout) == (LossSettings(), HeldoutSettings())


def test_loss_and_heldout_figures_follow_the_serving_block() -> None:
    rest = {"target": "t", "output": "o", "data": {"paths": ["p"]}, "curriculum": [{"steps": 1, "depth": 1}]}
    serving = {"lookahead": 4, "budget": 80, "fallback_lookahead": 2, "refresh": 1}
    follows = build_settings(TrainSettings, rest | {"serving": serving, "heldout": {"every": 7}})
    assert follows.loss.fan_out == 16 and follows.heldout.every == 7
    heldout = follows.heldout
    assert (heldout.lookahead, heldout.fallback_lookahead, heldout.refresh) == (4, 2, (1,))
    assert heldout.budgets == (20, 40, 80, 160)
    own = build_settings(
        TrainSettings, rest | {"serving": serving}, {"loss": {"fan_out": 3}, "heldout": {"budgets": [6]}}
    )
    assert own.loss.fan_out == 3 and own.heldout.budgets == (6,)
    with pytest.raises(UserError, match="'serving' = .*fallback_lookahead = 4 is more than lookahead = 3"):
        build_settings(TrainSettings, rest | {"serving": {"lookahead": 3, "fallback_lookahead": 4}})


@pytest.mark.parametrize("name", NAMES)
def test_data_files_hold_options_of_synthesize(name: str) -> None:
    text = (RECIPES / name / "data.yaml").read_text()
    options = yaml.safe_load(text)
    argv = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", *map(str, [value]))]
    parsed = synthesize._arguments(argv)
    [command] = [line for line in text.splitlines() if "python -m data.synthesize" in line]
    assert vars(synthesize._arguments(shlex.split(command)[4:])) == vars(parsed), "the command on top is another one"
    train, _ = settings_of(name)
    assert parsed.target == train.target and list(train.data.paths) == [parsed.out]


@pytest.mark.parametrize("name", NAMES)
def test_target_figures_are_a_transformers_config(name: str) -> None:
    config = transformers_config(name)
    train, serve = settings_of(name)
    assert default_taps(config.num_hidden_layers)[2] < config.num_hidden_layers
    assert train.drafter.draft_vocab_size < config.vocab_size
    assert serve.max_model_len <= config.max_position_embeddings
    scaling, cannot_follow = scaling_of_target(config.rope_parameters)
    assert cannot_follow is None
    assert (scaling is not None) == name.startswith("llama"), "Llama 3's rope scaling has to reach the drafter"
    assert config.rope_parameters["rope_theta"] == {"l": 500000.0, "q": 1000000.0, "s": 100000.0}[name[0]]


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_target_figures_give_the_published_parameter_count(name: str) -> None:
    config = transformers_config(name)
    total = config.num_hidden_layers * layer_parameters(config) + 2 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(GPU_TARGETS[name], rel=1e-3)


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_the_drafter_is_the_largest_that_fits_under_a_verification(name: str) -> None:
    """The arithmetic in the comment of serve.yaml: weights over bandwidth, all-reduces, launches; extend, glue and K
    tree steps.
    """
    config = transformers_config(name)
    train, serve = settings_of(name)
    devices = len(serve.target_devices)
    weights = 2 * (config.num_hidden_layers * layer_parameters(config) + config.vocab_size * config.hidden_size)
    verification = weights / devices / BANDWIDTH + (REDUCES * config.num_hidden_layers if devices > 1 else 0.0)

    def background(layers: int) -> float:
        drafter = (
            (layers - 1) * layer_parameters(config)
            + layer_parameters(config, 2)
            + train.drafter.draft_vocab_size * config.hidden_size
        )
        return (serve.lookahead + 2) * (2 * drafter / BANDWIDTH + layers * LAUNCHES)

    layers = train.drafter.num_hidden_layers
    assert background(layers) <= verification < background(layers + 1)
    comment = (RECIPES / name / "serve.yaml").read_text()
    for stated in (
        f"{weights / 1e9:.1f} GB of weights in {1e3 * verification:.1f} ms",
        f"{1e3 * background(layers):.1f} ms with {layers} layers",
    ):
        assert stated in comment, stated
    assert f"{layers + 1} layers would take {1e3 * background(layers + 1):.1f} ms" in comment
