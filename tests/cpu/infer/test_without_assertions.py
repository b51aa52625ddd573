"""Fault 38: what guards against a user's mistake may not be an assert, which `python -O` leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from infer.ipc.messages import VERSION
from tests.cpu.infer.recipe import write_recipe

ROOT = Path(__file__).parents[3]

# Runs in a Python without assertions: every mistake is made in one process, since starting one takes longest.
CHILD = """
import json, sys
from data import synthesize
from drafters.base.errors import UserError, run_command
from infer import evaluate, generate, serve
from infer.ipc.messages import _HEAD, unpack
from train import eagle3_selfcond

assert False, "assertions are on"
MAINS = {"generate": generate, "evaluate": evaluate, "serve": serve}
MAINS |= {"train": eagle3_selfcond, "synthesize": synthesize}
for name, arguments in json.loads(sys.argv[1]):
    print("==", name, arguments, file=sys.stderr)
    print(run_command(MAINS[name].main, arguments))
try:
    unpack(_HEAD.pack(int(sys.argv[2]), 2) + b"{}")
except UserError:
    print("refused")
"""


def test_mistakes_are_refused_without_assertions_too(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    ask = ["--recipe", recipe, "--prompt", "Hello", "--max-new-tokens", "4"]
    mistakes = [
        ("generate", ["--recipe", str(tmp_path / "none.yaml"), "--prompt", "Hello"]),
        ("generate", [*ask, "lookahed=2"]),
        ("generate", [*ask, "lookahead=0"]),
        ("generate", [*ask, "max_model_len=100000"]),
        ("generate", [*ask, f"drafter={broken}"]),
        ("generate", [*ask, "--prompt", "Hello " * 4000]),
        ("generate", [*ask, "--temperature", "-1"]),
        ("evaluate", ["--recipe", recipe, "--prompts", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]),
        ("evaluate", ["--recipe", recipe, "--prompts", recipe, "--out", str(tmp_path / "out")]),
        ("serve", ["--recipe", recipe, "--port", "-4"]),
        ("train", ["--config", str(tmp_path / "none.yaml")]),
        ("train", ["--config", str(ROOT / "recipes/smollm2-135m/train.yaml"), "optimizer.lr=-1"]),
        ("synthesize", ["--target", str(broken), "--out", str(tmp_path / "corpus")]),
        ("synthesize", ["--target", str(broken), "--out", str(tmp_path / "corpus"), "--shard", "3/2"]),
    ]
    command = [sys.executable, "-O", "-c", CHILD, json.dumps(mistakes), str(VERSION + 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * len(mistakes) + ["refused"], done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == len(mistakes), done.stderr
