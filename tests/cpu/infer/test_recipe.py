"""Recipes with a part for each mode, as all commands that serve or measure read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.base.errors import UserError
from infer.config import Mode
from infer.recipe import load_engine_settings


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text("target: t\ndrafter: d\nlookahead: 4\nbudget: 9\nmodes:\n  sd: {lookahead: 1}\n", encoding="utf-8")
    return file


def test_a_mode_takes_its_own_settings_and_the_command_line_wins(recipe: Path) -> None:
    assert load_engine_settings(str(recipe), Mode.SSD, []).lookahead == 4
    assert load_engine_settings(str(recipe), Mode.SD, []).lookahead == 1
    assert load_engine_settings(str(recipe), Mode.SD, ["lookahead=3"]).lookahead == 3
    assert load_engine_settings(str(recipe), Mode.SD, []).budget == 9


@pytest.mark.parametrize(
    "modes, complaint", [("{sdd: {lookahead: 1}}", "did you mean 'sd'"), ("[sd]", "has to hold settings by mode")]
)
def test_a_wrong_part_is_named(recipe: Path, modes: str, complaint: str) -> None:
    recipe.write_text(f"target: t\nmodes: {modes}\n", encoding="utf-8")
    with pytest.raises(UserError, match=complaint):
        load_engine_settings(str(recipe), Mode.AR, [])
