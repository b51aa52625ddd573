"""Recipes and `key=value` overrides: what is read, and how a mistake is told."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from drafters.base.errors import UserError
from drafters.base.settings import (
    Alias,
    Settings,
    build_layered,
    build_settings,
    deprecated_names_help,
    load_settings,
    parse_overrides,
    read_yaml,
)


class Optimizer(Settings):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


class Recipe(Settings):
    target: str
    lookahead: int = Field(default=5, ge=1)
    optimizer: Optimizer = Optimizer()


class Renamed(Recipe):
    aliases: ClassVar[Mapping[str, Alias]] = {
        "optimizer.rate": Alias("optimizer.lr"),
        "draft.length": Alias("lookahead", defaults={"optimizer.betas": [0.5, 0.5]}),
        "serving.lookahead": Alias("lookahead", deprecated=False),
    }


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_and_overrides_are_laid_over_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "target: tiny\nlookahead: 3\noptimizer:\n  betas: [0.8, 0.9]\n")
    recipe = load_settings(Recipe, path, ["lookahead=7", "optimizer.lr=1e-4"])
    assert recipe == Recipe(target="tiny", lookahead=7, optimizer=Optimizer(lr=1e-4, betas=(0.8, 0.9)))


def test_a_file_is_laid_over_those_before_it(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("base.yaml", "variant.yaml")]
    files[0].write_text("target: tiny\nlookahead: 3\noptimizer: {lr: 0.5, betas: [0.8, 0.9]}\n")
    files[1].write_text("lookahead: 4\noptimizer: {lr: 0.25}\n")
    expected = Recipe(target="tiny", lookahead=6, optimizer=Optimizer(lr=0.25, betas=(0.8, 0.9)))
    assert load_settings(Recipe, files, ["lookahead=6"]) == expected
    files[1].write_text("lookahaed: 4\n")
    with pytest.raises(UserError, match=r"base.yaml \+ .*variant.yaml: .*did you mean 'lookahead'"):
        load_settings(Recipe, files)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_settings(Optimizer, write(tmp_path, "")) == Optimizer()


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("lr=1e-4", {"lr": 1e-4}),  # YAML 1.1 alone reads this as a string
        ("lr=1.0e-4", {"lr": 1e-4}),
        ("n=5", {"n": 5}),
        ("on=true", {"on": True}),
        ("name=tiny", {"name": "tiny"}),
        ("none=null", {"none": None}),
        ("empty=", {"empty": None}),
        ("sizes=[1, 2]", {"sizes": [1, 2]}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
        ("path=a=b", {"path": "a=b"}),
    ],
)
def test_parse_overrides(pair: str, expected: dict[str, Any]) -> None:
    result = parse_overrides([pair])
    assert result == expected
    assert [type(value) for value in result.values()] == [type(value) for value in expected.values()]


def test_the_last_override_of_a_key_wins_and_neighbours_stay() -> None:
    assert parse_overrides(["a.x=1", "a.y=2", "a.x=3"]) == {"a": {"x": 3, "y": 2}}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_survives_as_python_writes_it(value: float) -> None:
    assert parse_overrides([f"x={value!r}"]) == {"x": value}


@pytest.mark.parametrize("pair", ["lookahead", "=5", ""])
def test_an_override_without_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(UserError, match="key=value"):
        parse_overrides([pair])


def test_an_override_whose_value_is_not_yaml_is_refused() -> None:
    with pytest.raises(UserError, match=r"sizes.*\[1, 2"):
        parse_overrides(["sizes=[1, 2"])


def test_an_override_below_a_plain_value_is_refused() -> None:
    with pytest.raises(UserError, match="'a.b' goes below 'a'"):
        parse_overrides(["a=1", "a.b=2"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lookahed=5"], ["unknown setting 'lookahed'", "did you mean 'lookahead'?"]),
        (["optimizer.betaz=[0, 1]"], ["unknown setting 'betaz'", "did you mean 'betas'?"]),
        (["lookahead=0"], ["'lookahead' = 0", "greater than or equal to 1"]),
        (["lookahead=many"], ["'lookahead' = 'many'", "valid integer"]),
        (["optimizer.lr=fast"], ["'optimizer.lr' = 'fast'", "valid number"]),
    ],
)
def test_a_mistake_names_file_key_and_value(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    path = write(tmp_path, "target: tiny\n")
    with pytest.raises(UserError) as caught:
        load_settings(Recipe, path, overrides)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_missing_setting_is_named_with_the_way_to_give_it() -> None:
    with pytest.raises(UserError, match="'target' is missing.*target=VALUE"):
        build_settings(Recipe, {})


def test_settings_cannot_be_changed() -> None:
    recipe = Recipe(target="tiny")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.lookahead = 6  # pyright: ignore[reportAttributeAccessIssue]


def test_building_leaves_its_inputs_alone() -> None:
    content = {"target": "tiny", "optimizer": {"lr": 0.5}}
    build_settings(Recipe, content, {"optimizer": {"lr": 0.1}})
    assert content == {"target": "tiny", "optimizer": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- a\n- b\n", "not a list"),
        ("just words", "not a str"),
        ("a: [1", "not valid YAML"),
        ("a: 1\n b: 2", "not valid YAML"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, word: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file: .*absent.yaml"):
        read_yaml(tmp_path / "absent.yaml")


def test_an_old_name_is_read_and_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "target: tiny\noptimizer: {rate: 0.25}\nserving: {lookahead: 7}\n")
    new = tmp_path / "new.yaml"
    new.write_text("target: tiny\nlookahead: 7\noptimizer: {lr: 0.25}\n")
    with caplog.at_level(logging.WARNING):
        recipes = [load_settings(Renamed, path) for _ in range(2)]
    assert recipes == [load_settings(Renamed, new)] * 2
    [message] = caplog.messages
    assert str(path) in message and "'optimizer.rate' is now called 'optimizer.lr'" in message


def test_the_later_layer_wins_by_whichever_name_it_gives_a_setting() -> None:
    contents = [{"target": "tiny", "lookahead": 2}, {"serving": {"lookahead": 3}}, {"draft": {"length": 4}}]
    for count, expected in enumerate((2, 3, 4), start=1):
        assert build_layered(Renamed, contents[:count]).lookahead == expected
        assert build_layered(Renamed, [*reversed(contents)][-count:]).lookahead == 2
    assert build_settings(Renamed, contents[0], parse_overrides(["serving.lookahead=9"])).lookahead == 9


def test_an_old_name_brings_the_defaults_of_its_time_under_everything_given() -> None:
    old = {"target": "tiny", "draft": {"length": 4}}
    assert build_settings(Renamed, old).optimizer.betas == (0.5, 0.5)
    given = {"target": "tiny", "optimizer": {"betas": [0.1, 0.2]}}
    assert build_layered(Renamed, [given, old]).optimizer.betas == (0.1, 0.2)
    assert build_settings(Renamed, given | {"lookahead": 4}).optimizer.betas == (0.1, 0.2)


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(UserError, match="'draft.length' and 'lookahead' are the same setting"):
        build_settings(Renamed, {"target": "tiny", "lookahead": 1, "draft": {"length": 2}})


def test_a_mistake_in_a_block_of_other_names_is_named() -> None:
    with pytest.raises(UserError, match="unknown setting 'lookahaed': did you mean 'lookahead'"):
        build_settings(Renamed, {"target": "tiny", "serving": {"lookahaed": 2}})


def test_help_lists_the_names_that_will_go() -> None:
    text = deprecated_names_help(Renamed)
    assert "optimizer.rate -> optimizer.lr" in text and "serving.lookahead" not in text
    assert not deprecated_names_help(Recipe)


def test_settings_and_errors_load_without_torch() -> None:
    """`--help` and a mistyped key answer at once, not after seconds of importing torch."""
    code = "import sys, drafters.base.errors, drafters.base.settings; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).resolve().parents[3]).returncode
        == 0
    )
