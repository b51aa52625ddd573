"""glibc malloc settings (huge pages, thresholds) for training on a CPU; glibc reads them when a program starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "GLIBC_TUNABLES"
# Huge pages: a step walks through a GB of weights, moments and activations; looking up so many small pages takes a
# tenth of it or more. What is freed stays here (up to a GB), since every step asks for the same again and new pages
# have to be cleared.
SETTINGS = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
GPUS = ("/dev/nvidia0", "/dev/kfd")


def set_up() -> None:
    """Start this program anew, in the same process, with settings for training on a CPU; returns where that is not
    needed.

    To be called before anything else. A user's own GLIBC_TUNABLES stay as they are.
    """
    on_gpu = (
        any(Path(device).exists() for device in GPUS) and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
    )
    if NAME not in os.environ and sys.platform == "linux" and not on_gpu:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, NAME: SETTINGS})
