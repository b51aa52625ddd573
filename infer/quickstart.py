"""Fetch a real target, fine-tune its drafter, measure the modes, and print what to run next: `make quickstart`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from drafters.base.errors import UserError, run_command
from infer.console import Parser, interruptible, loading

DESCRIPTION = """\
Fetch a small real model, fine-tune its drafter for a few minutes, measure ar, sd and ssd side by side, and show an
answer. A second run uses the drafter that the first one trained. To be started at the project's root."""
EXAMPLES = "  make quickstart\n  .venv/bin/python -m infer.quickstart --minutes 10"
TARGET = "builtin:smollm2-135m"
SHIPPED = "drafters/pretrained/smollm2-135m-eagle3"
RECIPES = "recipes/smollm2-135m"
PROMPTS = ("data/prompts/code.jsonl", "data/prompts/explain.jsonl", "data/prompts/math.jsonl")
# A few minutes of training on a part of the corpus: small steps, since the drafter to start from is good already.
FINE_TUNING = (
    f"drafter.init={SHIPPED}",
    "data.max_conversations=300",
    "data.heldout_conversations=24",
    "curriculum=[{steps: 120, depth: 5, anchors_per_row: 48}]",
    "optimizer.lr=5.0e-5",
    "optimizer.warmup_steps=10",
    "heldout.every=1000",
    "heldout.max_rows=8",
    "checkpoint.every=30",
)

console = Console(highlight=False, markup=False)  # a directory may have brackets in its name


def main(argv: list[str]) -> int:
    """The command."""
    parser = Parser("python -m infer.quickstart", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--out", default="runs/quickstart", metavar="DIR", help="where everything goes (default: runs/quickstart)"
    )
    parser.add_argument("--minutes", type=float, default=4.0, metavar="M", help="time for training steps (default: 4)")
    parser.add_argument("--num-prompts", type=int, default=12, metavar="N", help="prompts to measure on (default: 12)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="longest answer, in tokens (default: 96)"
    )
    options = parser.read(argv)
    check_place()
    out = Path(options.out)
    with step(1, "the target: SmolLM2-135M-Instruct"):
        target = fetch_target()
    with step(2, "its drafter: fine-tuning the shipped one on text that the target wrote"):
        drafter = fine_tuned_drafter(out, options.minutes)
    with step(3, "measuring: the target alone (ar), drafting in turns (sd), drafting at the same time (ssd)"):
        status = measure(drafter, out, options.num_prompts, options.max_new_tokens)
    if status != 0:
        return status
    show_answer(json.loads((out / "results.json").read_text(encoding="utf-8")), target)
    console.print(what_next(drafter, out), soft_wrap=True)
    return 0


def check_place() -> None:
    """Raise `UserError` where the files this command works on are not there."""
    for path in (f"{SHIPPED}/config.json", f"{RECIPES}/train.yaml", f"{RECIPES}/evaluate.yaml", *PROMPTS):
        if not Path(path).exists():
            raise UserError(
                f"no such file or directory: {path}; run `make quickstart` at the root of a complete checkout"
            )


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """A heading, and afterwards how long it took."""
    console.print(f"\n{number}/3  {title}", style="bold")
    started = time.monotonic()
    yield
    seconds = int(time.monotonic() - started)
    console.print(f"step {number} took {seconds // 60}:{seconds % 60:02d}", style="dim")


def fetch_target() -> str:
    """The target's directory; downloaded and converted by the first run."""
    from drafters.targets.files import resolve_target

    with loading("fetching and converting (once; about 100 MB) ..."):
        place = resolve_target(TARGET)
    console.print(f"ready: {place}")
    return place


def fine_tuned_drafter(out: Path, minutes: float) -> Path:
    """The drafter of `out/train`; trained now, or further, unless a run was completed there."""
    best, final = (out / "train" / name for name in ("best-eagle3", "final-eagle3"))
    if best.is_dir() and final.is_dir():
        console.print(f"trained by an earlier run: {best} (delete {out / 'train'} to train again)")
        return best
    command = training_command(out, minutes)
    console.print("$ " + " ".join(["accelerate", "launch", *command[3:]]), style="dim", soft_wrap=True)
    with interruptible() as interrupt:  # Ctrl-C is training's to handle: it saves its state
        status = subprocess.run(command, check=False).returncode
    if interrupt:
        raise KeyboardInterrupt
    if status != 0 or not best.is_dir():
        raise UserError(
            f"training ended with status {status}; its message stands above, and running this command again resumes it"
        )
    return best


def training_command(out: Path, minutes: float) -> list[str]:
    """`accelerate launch train/eagle3_selfcond.py ...` in one process with all cores."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--num_cpu_threads_per_process", str(os.cpu_count() or 1)]
    layers = json.loads((Path(SHIPPED) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    places = [
        f"drafter.num_hidden_layers={layers}",
        f"output={out / 'train'}",
        f"features.directory={out / 'features'}",
        f"minutes={minutes}",
    ]
    return [*launcher, "train/eagle3_selfcond.py", "--config", f"{RECIPES}/train.yaml", *FINE_TUNING, *places]


def measure(drafter: Path, out: Path, num_prompts: int, max_new_tokens: int) -> int:
    """`infer.evaluate` on the shipped prompts, none of which is in the corpus; its exit status."""
    from infer import evaluate

    arguments = [
        "--recipe",
        f"{RECIPES}/evaluate.yaml",
        "--prompts",
        *PROMPTS,
        "--out",
        str(out),
        "--modes",
        "ar,sd,ssd",
    ]
    arguments += ["--num-prompts", str(num_prompts), "--max-new-tokens", str(max_new_tokens), f"drafter={drafter}"]
    return evaluate.main(arguments)


def show_answer(results: dict[str, Any], target: str) -> None:
    """The first question and the answer that ssd gave."""
    from transformers import AutoTokenizer

    from data.prompts import read_prompts
    from infer.text.detokenize import decode

    run = next(run for run in results["runs"] if run["mode"] == "ssd")
    output = run["outputs"][-1]
    prompt = next(prompt for prompt in read_prompts(PROMPTS) if prompt.id == output["id"])
    answer = decode(AutoTokenizer.from_pretrained(target), output["token_ids"])
    cut = " ..." if output["finish_reason"] == "length" else ""
    text = f"{prompt.messages[-1]['content'].strip()}\n\n{answer.strip()}{cut}"
    console.print(Panel(Text(text), title="a question and the answer in mode ssd", title_align="left"))


def what_next(drafter: Path, out: Path) -> str:
    """The commands to go on with."""
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    recipe = f"--recipe {RECIPES}/serve.yaml drafter={drafter}"
    lines = (
        f"report with plots   {out / 'report.html'}",
        f"all figures         {out / 'results.json'}",
        f"chat                {python} -m infer.generate {recipe}",
        f"serve               {python} -m infer.serve {recipe}",
        "                    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\",
        """                      -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'""",
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
