"""What holds for every test: no network, one thread per process, and a Hugging Face home of its own.

Set before torch and the hub libraries are imported, because they read these variables once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

# Empty, so that no test reads what the user has downloaded or leaves files there.
hugging_face_home = tempfile.mkdtemp(prefix="ssd-drafters-tests-")
atexit.register(shutil.rmtree, hugging_face_home, ignore_errors=True)

os.environ.update(
    HF_HOME=hugging_face_home,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny target and a drafter that really drafts for it, `(Target, Path)`, trained once for all tests."""
    from tests import trained

    return trained.trained_pair(tmp_path_factory.mktemp("trained"))
