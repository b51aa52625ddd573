"""Recipes of serving and measuring: settings for all modes, and under `modes:` what one mode has of its own
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafters.base.errors import UserError, unknown_name
from drafters.base.settings import build_layered, parse_overrides, read_yaml
from infer.config import EngineSettings, Mode


class Recipe(NamedTuple):
    """A file as it was read; `where` is its name for messages."""

    where: str
    common: dict[str, Any]
    by_mode: dict[Mode, dict[str, Any]]

    def settings(self, mode: Mode, *overrides: Mapping[str, Any]) -> EngineSettings:
        """Of one mode: the file's, then those of its part `modes:`, then the overrides; the later one wins."""
        return build_layered(EngineSettings, [self.common, self.by_mode.get(mode, {}), *overrides], self.where)


def read_recipe(path: str) -> Recipe:
    """Read a recipe. Raises `UserError` where the file is missing or its part `modes:` is no mapping of modes to
    settings.
    """
    common = read_yaml(path)
    modes = common.pop("modes", None) or {}
    if not isinstance(modes, Mapping) or not all(isinstance(value, Mapping) for value in modes.values()):
        raise UserError(f"{path}: `modes:` has to hold settings by mode, such as sd: {{lookahead: 2}}")
    return Recipe(
        path, common, {mode_named(name, f"{path}: modes"): dict(settings) for name, settings in modes.items()}
    )


def load_engine_settings(path: str, mode: Mode, overrides: Sequence[str]) -> EngineSettings:
    """The settings of one mode out of a recipe and `key=value` overrides."""
    return read_recipe(path).settings(mode, parse_overrides(overrides))


def mode_named(name: str, where: str) -> Mode:
    """The mode of that name; `UserError` with the nearest known one where there is none."""
    try:
        return Mode(str(name).strip())
    except ValueError:
        raise UserError(f"{where}: {unknown_name('mode', str(name), [mode.value for mode in Mode])}") from None
