"""A recipe for tests: a tiny random target, a tiny random drafter, and the settings that serve them, in fp32."""

from __future__ import annotations

from pathlib import Path

from drafters.targets.target import Target, load_target
from tests.tiny import save_tiny_drafter, save_tiny_target


def write_recipe(directory: Path) -> Path:
    """`recipe.yaml` in `directory`, beside target and drafter."""
    directory.mkdir(exist_ok=True)
    target_directory = save_tiny_target(directory / "target")
    drafter = save_tiny_drafter(directory / "tiny-eagle3", load_target(str(target_directory), "float32"))
    recipe = directory / "recipe.yaml"
    recipe.write_text(
        f"target: {target_directory}\ndrafter: {drafter}\ndtype: float32\n"
        "lookahead: 3\nbudget: 8\nmax_model_len: 160\n"
        "target_devices: [cpu]\ndraft_devices: [cpu]\n",
        encoding="utf-8",
    )
    return recipe


def target_of(recipe: Path) -> Target:
    """The recipe's target."""
    return load_target(str(recipe.parent / "target"), "float32")
