"""Atomic writes: a file or a directory appears whole or not at all, whatever interrupts the writer.

The content is written under a temporary name beside its place, flushed to the disk, and only then renamed. Without the
fsync before the rename, a power cut could leave the new name over content that never reached the disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

Writer = Callable[[Path], object]


def atomic_write(final: Path, write: Writer) -> Path:
    """Replace `final` by the file that `write` makes under the path it is given. Returns `final`.

    Where `write` raises, the old file stays and the temporary one is removed.
    """
    atomic_write_group({final: write})
    return final


def atomic_write_text(final: Path, text: str) -> Path:
    """Replace `final` by a UTF-8 file with this text. Returns `final`."""
    return atomic_write(final, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def atomic_write_group(writers: Mapping[Path, Writer]) -> None:
    """Replace several files. Each is replaced atomically, and none before all of them are written, so that a writer
    that fails leaves every old file.
    """
    temporary = {final: _temporary_name(final) for final in writers}
    try:
        for final, write in writers.items():
            write(temporary[final])
            _fsync(temporary[final])
        for final in writers:
            os.replace(temporary[final], final)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    for directory in {final.parent for final in writers}:
        _fsync(directory)


def atomic_write_directory(final: Path, write: Writer) -> Path:
    """Replace the directory `final` by the one that `write` fills at the path it is given. Returns `final`.

    Parents are made where they are missing. Where `write` raises, the old directory stays and the temporary one is
    removed.
    """
    temporary = _temporary_name(final)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _fsync(path)
        _swap_directories(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def remove_temporary(directory: Path) -> None:
    """Remove the temporary files that killed writers left in `directory`. Only for a directory with one writer and no
    other hidden files.
    """
    for left in directory.glob(".*"):
        if left.is_file():
            left.unlink()


def _swap_directories(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`. A directory cannot be renamed over a full one, so the old one is renamed first,
    and renamed back where an error or an interrupt keeps the new one from taking its place.
    """
    old = temporary.with_suffix(".old")
    try:
        if final.exists():
            final.rename(old)
        temporary.rename(final)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    _fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _temporary_name(final: Path) -> Path:
    """A hidden path beside `final` that no other thread, process or node uses."""
    return final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def _fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
