"""Train an EAGLE-3 drafter for SSD by the self-conditioned unroll: settings, preparation, loop.

accelerate launch train/eagle3_selfcond.py --config recipes/smollm2-135m/train.yaml [key=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys

try:
    from drafters.errors import CommandParser, UserError, run_command
except ModuleNotFoundError:
    sys.exit("error: the project is not installed in this Python: run `make env` and use .venv/bin/accelerate, or `pip install -e .`")

from drafters.settings import load_settings
from train.config import TrainSettings

DESCRIPTION = """\
Train an EAGLE-3 drafter for SSD (speculative speculative decoding) on text that the target wrote.

The first run computes the target's features and keeps them on disk. Ctrl-C saves the state; the same command goes on from it.
Writes to the recipe's `output`: metrics.jsonl, states/ to resume from, best-eagle3/ and final-eagle3/ to serve."""
EXAMPLES = """\
  accelerate launch train/eagle3_selfcond.py --config recipes/smollm2-135m/train.yaml
  ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train/eagle3_selfcond.py --config R minutes=10   (two on CPU)
  python train/eagle3_selfcond.py --config R drafter.num_hidden_layers=2 output=runs/train/two-layers

Every setting of train/config.py can be given as key=value; a list of stages as 'curriculum=[{steps: 100, depth: 3}]'."""


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    settings = load_settings(TrainSettings, options.config, options.overrides)
    check_launch()
    import torch  # below the settings, so that a mistyped key is answered at once

    from train.console import Console
    from train.loop import train
    from train.prepare import prepare

    console = Console(speaks=_environment("RANK", 0) == 0)
    torch.set_num_threads(_environment("OMP_NUM_THREADS", os.cpu_count() or 1))
    local_rank = _environment("LOCAL_RANK", 0)
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    prepared = prepare(settings, device, local_rank == 0, console.say, console.show)
    train(settings, prepared, console)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Options of the command; `overrides` are the key=value pairs."""
    parser = CommandParser("train/eagle3_selfcond.py", DESCRIPTION, EXAMPLES)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a YAML recipe, for example recipes/smollm2-135m/train.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    return parser.parse_intermixed_args(argv)


def check_launch() -> None:
    """Refuse a launch that asked for several processes and started one: `accelerate launch --cpu` does that, and says nothing."""
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "`accelerate launch --cpu --num_processes N` starts one process only: "
            "use ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N"
        )


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


if __name__ == "__main__":
    sys.exit(run_command(main))
