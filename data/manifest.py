"""The manifest of a data set: target, sampling, prompts and checksums of the files (data/README.md, section 1).

A drafter only works for the target that wrote its training text, so training copies the manifest into the drafter
card. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from drafters.base.errors import UserError
from drafters.base.files import atomic_write_text
from drafters.base.settings import Settings, build_settings
from drafters.targets.identity import TargetIdentity
from drafters.targets.template import TemplateOptions, differences

MANIFEST_NAME = "manifest.json"


class Sampling(Settings):
    """Sampling settings. Several temperatures mean a mix, 0 is greedy; `top_k` and `top_p` are None where unused."""

    temperatures: tuple[float, ...]
    max_new_tokens: int
    top_k: int | None = None
    top_p: float | None = None


class Run(Settings):
    """One run of the generator that a data set holds rows of."""

    seed: int
    sampling: Sampling
    prompt_source: str


class Manifest(Settings):
    """The record of a data set. `files` maps file names, relative to the manifest's directory, to their SHA-256.

    A corpus grown by several runs names each in `runs`; `seed` is then the first one's, `sampling` what covers them
    all.
    """

    version: Literal[1] = 1
    target: str
    target_weight_hash: str
    tokenizer_hash: str
    template_hash: str
    template_options: dict[str, Any] = Field(default_factory=dict)
    sampling: Sampling
    seed: int
    prompt_source: str
    runs: tuple[Run, ...] = ()
    num_rows: int
    num_truncated: int = 0
    num_response_tokens: int
    subjects: dict[str, int] = Field(default_factory=dict)
    files: dict[str, str]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(directory: Path, paths: list[Path]) -> dict[str, str]:
    """The `files` field for `paths`, which lie in or below `directory`."""
    return {path.relative_to(directory).as_posix(): sha256_of(path) for path in sorted(paths)}


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Write `directory/manifest.json` atomically, so that a reader never sees half of it."""
    content = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    return atomic_write_text(directory / MANIFEST_NAME, content + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read `directory/manifest.json`. Raises `UserError`, naming the file, where it is missing or malformed."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"no {MANIFEST_NAME} in {directory}: data sets made by `python -m data.synthesize` have one")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}): generate the data set again or restore the file"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} has to hold one JSON object, not a {type(content).__name__}")
    return build_settings(Manifest, content, where=str(path))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the data files with their checksums. Raises `UserError` naming the first one that is missing or has
    changed.
    """
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(
                f"{path} is missing though {MANIFEST_NAME} lists it: restore it or generate the data set again"
            )
        found = sha256_of(path)
        if found != expected:
            raise UserError(
                f"{path} has SHA-256 {found[:12]}..., {MANIFEST_NAME} says {expected[:12]}...: "
                "restore it or make the data set again"
            )


def provenance(paths: Sequence[str], name: str, target: TargetIdentity, options: TemplateOptions) -> list[str]:
    """Differences between the target `name` and the one that wrote the data sets `paths`, one line each.

    A drafter trained on another model's text, or on another thinking mode, drafts badly, and no loss shows it.
    """
    lines = []
    for path in paths:
        if not (Path(path) / MANIFEST_NAME).is_file():
            lines.append(
                f"{path} has no {MANIFEST_NAME}: "
                f"make sure that {name} itself wrote its answers (python -m data.synthesize)"
            )
            continue
        manifest = read_manifest(Path(path))
        for what, made, asked in (
            ("target weights", manifest.target_weight_hash, target.weight_hash),
            ("a tokenizer", manifest.tokenizer_hash, target.tokenizer_hash),
            ("a chat template", manifest.template_hash, target.template_hash),
        ):
            if made != asked:
                lines.append(f"{path} was written with {what} of hash {made} ({manifest.target}), {name} has {asked}")
        for difference in differences(manifest.template_options, options.recorded()):
            lines.append(f"{path} was written with other chat template options: data.template.{difference}")
    return lines
