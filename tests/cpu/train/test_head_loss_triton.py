"""The head's losses in Triton's interpreter, in value and gradient, against torch in closed form.

In a process of their own: Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("temperature", [0, 1])
def test_kernels_equal_those_of_torch(temperature: int) -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.cpu.train.head_loss_triton_cases", str(temperature)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("equal") == 8
