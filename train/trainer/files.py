"""Files that are whole or not there, whatever interrupts the writing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(final: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` write beside `final`, bring it to the disk, and only then put it in place. Returns `final`.

    Without the first fsync a power cut could leave the new name over content that never reached the disk.
    """
    beside = final.with_name(f".{final.name}.{os.getpid()}")
    write(beside)
    _to_disk(beside)
    os.replace(beside, final)
    _to_disk(final.parent)
    return final


def remove_partial(directory: Path) -> None:
    """Remove what interrupted writers left in `directory`. Only for a directory with one writer."""
    for left in directory.glob(".*"):
        if left.is_file():
            left.unlink()


def _to_disk(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
