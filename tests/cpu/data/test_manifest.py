"""A manifest survives the disk, is never half written, and notices changed files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from data.manifest import (
    MANIFEST_NAME,
    Manifest,
    Sampling,
    check_files,
    checksums,
    provenance,
    read_manifest,
    sha256_of,
    write_manifest,
)
from drafters.base.errors import UserError
from drafters.targets.identity import TargetIdentity
from drafters.targets.template import TemplateOptions


def make_manifest(directory: Path) -> Manifest:
    part = directory / "part-0.jsonl"
    part.write_bytes(b'{"prompt": "a"}\n')
    return Manifest(
        target="builtin:tiny",
        target_weight_hash="w" * 64,
        tokenizer_hash="k" * 64,
        template_hash="t" * 64,
        sampling=Sampling(temperatures=(0.0, 0.8), max_new_tokens=256),
        seed=7,
        prompt_source="self-prompted",
        num_rows=1,
        num_response_tokens=12,
        subjects={"code": 1},
        files=checksums(directory, [part]),
    )


def test_round_trip(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    assert manifest.files == {"part-0.jsonl": hashlib.sha256(b'{"prompt": "a"}\n').hexdigest()}
    assert write_manifest(tmp_path, manifest) == tmp_path / MANIFEST_NAME
    assert read_manifest(tmp_path) == manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_NAME, "part-0.jsonl"]


def test_data_of_another_target_or_thinking_mode_are_named(tmp_path: Path) -> None:
    target = TargetIdentity("w" * 64, "k" * 64, "t" * 64)
    write_manifest(
        tmp_path, make_manifest(tmp_path).model_copy(update={"template_options": {"enable_thinking": False}})
    )
    fits = TemplateOptions(enable_thinking=False)
    assert provenance([str(tmp_path)], "T", target, fits) == []
    (line,) = provenance([str(tmp_path)], "T", target, TemplateOptions())
    assert line.endswith("data.template.enable_thinking was False, is not given now")
    weights, template = provenance([str(tmp_path)], "T", TargetIdentity("x", "k" * 64, "y"), fits)
    assert (
        "target weights of hash wwww" in weights
        and "T has x" in weights
        and "a chat template of hash tttt" in template
    )
    (line,) = provenance(["chats.jsonl"], "T", target, fits)
    assert line.startswith("chats.jsonl has no manifest.json: make sure that T itself wrote its answers")


def test_an_interrupted_write_keeps_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(tmp_path)
    write_manifest(tmp_path, manifest)

    def fail(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="power cut"):
        write_manifest(tmp_path, manifest.model_copy(update={"num_rows": 2}))
    assert read_manifest(tmp_path) == manifest


def test_changed_and_missing_files_are_named(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    check_files(tmp_path, manifest)
    part = tmp_path / "part-0.jsonl"
    part.write_bytes(b'{"prompt": "b"}\n')
    with pytest.raises(UserError, match=rf"part-0\.jsonl has SHA-256 {sha256_of(part)[:12]}"):
        check_files(tmp_path, manifest)
    part.unlink()
    with pytest.raises(UserError, match=r"part-0\.jsonl is missing"):
        check_files(tmp_path, manifest)


def test_bad_manifests_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json in"):
        read_manifest(tmp_path)
    path = tmp_path / MANIFEST_NAME
    path.write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is not valid JSON"):
        read_manifest(tmp_path)
    path.write_text("[]")
    with pytest.raises(UserError, match="one JSON object, not a list"):
        read_manifest(tmp_path)
    content = make_manifest(tmp_path).model_dump(mode="json")
    path.write_text(json.dumps({**content, "num_row": 3}))
    with pytest.raises(UserError, match="'num_row': did you mean 'num_rows'"):
        read_manifest(tmp_path)
    del content["seed"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="'seed' is missing"):
        read_manifest(tmp_path)
