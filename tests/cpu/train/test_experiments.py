"""The variants of the experiment: valid recipes that differ in what they compare, at the same start, seed, rows and
work.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drafters.base.settings import load_settings
from train.config import Stage, TrainSettings
from train.costs.plan import flops, forwards, products, replayed
from train.costs.sizes import drafter_config, target_size

PLACE = Path(__file__).parents[3] / "recipes" / "smollm2-135m" / "experiments"
FROM_WARM = ("A", "B-flat", "B-visited", "C-replay", "C-window", "D-bonus", "E-acceptance")
LAYERS = (1, 2, 6)  # four are the variants themselves
ROW = [150, 190]  # the answers of a row of 512 tokens


def settings_of(*names: str) -> TrainSettings:
    return load_settings(TrainSettings, [PLACE / f"{name}.yaml" for name in ("base", *names)])


def work(settings: TrainSettings, layers: int) -> float:
    """Operations of the matrix products of the whole curriculum, on rows that are all alike."""
    sizes = target_size(settings.target, PLACE.parent / "train.yaml")
    shape = settings.drafter.model_copy(update={"init": "target", "num_hidden_layers": layers})
    config = drafter_config(settings.model_copy(update={"drafter": shape}), sizes.config)

    def of(stage: Stage) -> float:
        rows = [ROW] * settings.batch.rows_per_step
        done = forwards(
            rows, settings.data.row_length, stage.depth, stage.anchors_per_row, settings.batch.rows_per_forward
        )
        if stage.replay:
            done = [
                replayed(forward, settings.serving.lookahead, settings.serving.refresh, stage.depth)
                for forward in done
            ]
        return stage.steps * sum(flops(products(config, forward)) for forward in done)

    return sum(of(stage) for stage in settings.curriculum)


def same(settings: TrainSettings, other: TrainSettings, *parts: str) -> None:
    for part in (*parts, "target", "seed", "dtype", "data", "features", "batch", "heldout", "checkpoint"):
        assert getattr(settings, part) == getattr(other, part), (settings.output, part)


@pytest.mark.parametrize("name", FROM_WARM)
def test_a_variant_has_the_start_the_rows_and_the_work_of_the_usual_recipe(name: str) -> None:
    usual, settings = settings_of("A"), settings_of(name)
    assert [stage.depth for stage in usual.curriculum] == [6] and usual.loss.gamma == 0.8
    assert settings.total_steps == usual.total_steps and settings.output == f"runs/experiments/{name}"
    assert work(settings, 4) == pytest.approx(work(usual, 4), rel=0.02)
    same(settings, usual, "drafter", "optimizer")


@pytest.mark.parametrize("name", ["C-replay", "D-bonus", "E-acceptance"])
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_are_compared_at_the_same_work_too(name: str, layers: int) -> None:
    best, settings = settings_of(name), settings_of(name, f"F-{layers}")
    assert work(settings, layers) == pytest.approx(work(best, 4), rel=0.02)
    assert settings.output == f"runs/experiments/F-{layers}" and settings.loss == best.loss
    same(settings, best, "optimizer")


@pytest.mark.parametrize("layers", LAYERS)
def test_layers_start_from_as_much_work_as_the_four_did(layers: int) -> None:
    warm, settings = settings_of("warm"), settings_of("warm", f"F-{layers}-warm")
    assert work(settings, layers) == pytest.approx(work(warm, 4), rel=0.02)
    assert settings.drafter.num_hidden_layers == layers and settings.drafter.init == "target"
    assert settings_of("A", f"F-{layers}").drafter.init == f"{settings.output}/final-eagle3"
    same(settings, warm, "loss", "optimizer")


@pytest.mark.parametrize("name", FROM_WARM)
def test_the_old_forms_of_the_files_load_to_the_same_settings(name: str, tmp_path: Path) -> None:
    """Before the `serving:` block: K and F below the loss, K again for the held-out figures, and losses' old names."""
    for file in ("base", name):
        content = yaml.safe_load((PLACE / f"{file}.yaml").read_text())
        loss = content.get("loss", {})
        for new, old in (("cross_entropy", "kl"), ("total_variation", "acceptance")):
            loss |= {old: loss.pop(new)} if new in loss else {}
        if content.pop("serving", None):
            loss["serving"] = {"lookahead": 5, "fan_out": 4}
            content["heldout"]["lookahead"] = 5
        (tmp_path / f"{file}.yaml").write_text(yaml.safe_dump(content))
    old = load_settings(TrainSettings, [tmp_path / f"{file}.yaml" for file in ("base", name)])
    assert old == settings_of(name)


def test_they_start_where_the_warm_run_ends_and_are_all_explained() -> None:
    warm = settings_of("warm")
    assert settings_of("A").drafter.init == f"{warm.output}/final-eagle3"
    assert warm.data == settings_of("A").data and warm.features == settings_of("A").features
    explained = (PLACE / "README.md").read_text()
    files = {path.stem for path in PLACE.glob("*.yaml")}
    assert files == {"base", "warm", *FROM_WARM, *(f"F-{layers}{part}" for layers in LAYERS for part in ("", "-warm"))}
    assert all(name in explained for name in files)
