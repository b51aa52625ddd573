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
from drafters.base.settings import load_settings
from drafters.eagle3_ssd.config import default_taps
from drafters.eagle3_ssd.rope import scaling_of_target
from infer.config import EngineSettings
from infer.evaluate import parse, plan_runs
from train.config import TrainSettings

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
    assert max(stage.depth for stage in train.curriculum) >= 2 * serve.lookahead + 1
    for file in ("train", "serve", "evaluate"):
        assert f"recipes/{name}/{file}.yaml" in (RECIPES / name / f"{file}.yaml").read_text(), (
            "the command stands on top"
        )


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
