"""The runs that `infer.evaluate` compares: modes with their settings, from a recipe and the command's options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from drafters.base.errors import UserError
from drafters.base.settings import parse_overrides
from infer.config import BASELINE, EngineSettings, Mode
from infer.recipe import mode_named, read_recipe


class Run(NamedTuple):
    """A mode with its settings. The label is the mode; of a run of `--beside` it is the option's whole value."""

    label: str
    mode: Mode
    settings: EngineSettings


def plan_runs(options: argparse.Namespace) -> list[Run]:
    """The runs in their order. A setting comes from the recipe, its part `modes:`, `key=value`, `--set`, `--beside`:
    the last of them wins. Raises `UserError` for a mode given twice, one without its drafter, and a target that
    differs.
    """
    recipe = read_recipe(options.recipe)
    common = parse_overrides(options.overrides)
    if options.dtype is not None:
        common["dtype"] = options.dtype
    only = _only_for(options.set)
    modes = [mode_named(name, "--modes") for name in options.modes.split(",")]
    if len(set(modes)) < len(modes):
        raise UserError(
            f"--modes {options.modes}: a mode stands there twice; --beside measures one again with other settings"
        )
    runs = []
    baseline = [(BASELINE, Mode.AR, {})] if options.baseline else []
    for label, mode, extra in (
        [(mode.value, mode, {}) for mode in modes] + [_beside(text) for text in options.beside] + baseline
    ):
        settings = recipe.settings(mode, common, only.get(mode, {}), extra, {"batch_size": 1})
        if mode is not Mode.AR and settings.drafter is None:
            raise UserError(
                f"{options.recipe}: mode {mode} needs a drafter; add `drafter: DIRECTORY` or give drafter=DIRECTORY"
            )
        runs.append(Run(label, mode, settings))
    _check_one_target(runs)
    return runs


def _only_for(pairs: Sequence[str]) -> dict[Mode, dict[str, Any]]:
    overrides: dict[Mode, list[str]] = {}
    for pair in pairs:
        name, colon, override = pair.partition(":")
        if not colon:
            raise UserError(f"cannot read --set {pair}: write it as MODE:key=value, for example sd:lookahead=2")
        overrides.setdefault(mode_named(name, "--set"), []).append(override)
    return {mode: parse_overrides(of_mode) for mode, of_mode in overrides.items()}


def _beside(text: str) -> tuple[str, Mode, dict[str, Any]]:
    name, *pairs = text.split()
    if not pairs:
        raise UserError(f'--beside "{text}": give the mode and what differs, for example "ar target_threads=2"')
    return text, mode_named(name, "--beside"), parse_overrides(pairs)


def _check_one_target(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        for name in ("target", "dtype"):
            if getattr(run.settings, name) != getattr(runs[0].settings, name):
                raise UserError(
                    f"{run.label}: {name} differs between the runs; all share one loaded target: "
                    "measure it in a run of its own"
                )
