"""Atomic writes: old content or new content, never a part of it, and flushed before it gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafters.base import files
from drafters.base.files import (
    atomic_write,
    atomic_write_directory,
    atomic_write_group,
    atomic_write_text,
    remove_temporary,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def half(path: Path) -> None:
    """A writer that is interrupted."""
    (path / "half" if path.is_dir() else path).write_text("half")
    raise KeyboardInterrupt


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the system calls that matter, in order."""
    done: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename
    monkeypatch.setattr(files.os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (done.append("rename"), rename(a, b))[1])
    return done


def test_content_reaches_the_disk_before_its_name_does(tmp_path: Path, calls: list[str]) -> None:
    assert atomic_write(tmp_path / "x", lambda path: path.write_text("y")) == tmp_path / "x"
    assert calls == ["fsync", "rename", "fsync"] and (tmp_path / "x").read_text() == "y"


def test_a_directory_with_all_its_files_reaches_the_disk_before_its_name_does(
    tmp_path: Path, calls: list[str]
) -> None:
    def write(path: Path) -> None:
        (path / "deep").mkdir()
        (path / "deep" / "a").write_text("a")

    assert atomic_write_directory(tmp_path / "new" / "d", write) == tmp_path / "new" / "d"
    assert calls == ["fsync"] * 3 + ["rename", "fsync"]  # a, deep and d; the parent after the rename
    assert (tmp_path / "new" / "d" / "deep" / "a").read_text() == "a"


def test_text_is_utf8_and_replaces_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a much longer text")
    atomic_write_text(tmp_path / "x", "é\n")
    assert (tmp_path / "x").read_bytes() == b"\xc3\xa9\n" and names(tmp_path) == ["x"]


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "x", half)
    assert (tmp_path / "x").read_text() == "old" and names(tmp_path) == ["x"]


def test_a_group_is_replaced_only_when_all_of_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        atomic_write_group({tmp_path / "a": lambda path: path.write_text("new"), tmp_path / "b": half})
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]
    atomic_write_group({tmp_path / name: lambda path, name=name: path.write_text(f"new {name}") for name in "ab"})
    assert [(tmp_path / name).read_text() for name in names(tmp_path)] == ["new a", "new b"]


def test_a_directory_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    place = tmp_path / "d"
    atomic_write_directory(place, lambda path: (path / "old").write_text("old"))
    with pytest.raises(KeyboardInterrupt):
        atomic_write_directory(place, half)
    assert names(place) == ["old"] and names(tmp_path) == ["d"]
    atomic_write_directory(place, lambda path: (path / "new").write_text("new"))
    assert names(place) == ["new"] and names(tmp_path) == ["d"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["OSError", "Ctrl-C"])
def test_a_directory_that_cannot_be_replaced_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    place, rename = tmp_path / "d", Path.rename
    atomic_write_directory(place, lambda path: (path / "old").write_text("old"))

    def refused(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(type(error)):
        atomic_write_directory(place, lambda path: (path / "new").write_text("new"))
    assert names(place) == ["old"] and names(tmp_path) == ["d"]


def test_two_writers_of_one_file_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    def write_outer(path: Path) -> None:
        path.write_text("outer")
        atomic_write_text(tmp_path / "x", "inner")
        assert path.read_text() == "outer"

    atomic_write(tmp_path / "x", write_outer)
    assert (tmp_path / "x").read_text() == "outer" and names(tmp_path) == ["x"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    for name in (".step-1.77", ".step-2.78-0a1b2c3d.partial", "step-1"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".hidden").mkdir()
    remove_temporary(tmp_path)
    assert names(tmp_path) == [".hidden", "step-1"]
