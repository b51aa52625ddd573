"""Training on a CPU starts anew with malloc set for it, once, with the same arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.parallel import malloc

PROGRAM = """
import json, os, sys
from train.parallel import malloc
malloc.GPUS = tuple(json.loads(os.environ["TEST_GPUS"]))
if __name__ == "__main__":
    malloc.set_up()
    print(json.dumps([os.getpid(), sys.argv[1:], sys.flags.utf8_mode, os.environ.get(malloc.NAME)]))
"""


def started(tmp_path: Path, gpus: list[str], **environment: str) -> tuple[list[object], int]:
    (tmp_path / "program.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if name not in (malloc.NAME, "ACCELERATE_USE_CPU")}
    variables = {**inherited, "PYTHONPATH": os.getcwd(), "TEST_GPUS": json.dumps(gpus), **environment}
    command = [sys.executable, "-X", "utf8", str(tmp_path / "program.py"), "--config", "a b.yaml", "x=[1, 2]"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(output), process.pid


def test_it_is_set_once_and_nothing_else_changes(tmp_path: Path) -> None:
    found, pid = started(tmp_path, [])
    assert found == [pid, ["--config", "a b.yaml", "x=[1, 2]"], 1, malloc.SETTINGS]


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        (["/dev/null"], {}, None),
        (["/dev/null"], {"ACCELERATE_USE_CPU": "true"}, malloc.SETTINGS),
        ([], {malloc.NAME: "glibc.malloc.arena_max=1"}, "glibc.malloc.arena_max=1"),
    ],
)
def test_where_a_gpu_trains_or_the_user_has_set_it_nothing_is_done(
    tmp_path: Path, gpus: list[str], environment: dict[str, str], expected: str | None
) -> None:
    assert started(tmp_path, gpus, **environment)[0][-1] == expected
