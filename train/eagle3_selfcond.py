"""Train an EAGLE-3 drafter for SSD by the self-conditioned unroll: settings, preparation, loop.

accelerate launch train/eagle3_selfcond.py --config recipes/smollm2-135m/train.yaml [key=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

try:
    from drafters.base.errors import CommandParser, UserError, run_command
except ModuleNotFoundError:
    sys.exit(
        "error: the project is not installed in this Python: run `make env` and use .venv/bin/accelerate, "
        "or `pip install -e .`"
    )

from drafters.base.settings import deprecated_names_help, load_settings
from train.config import TrainSettings
from train.costs.gpus import gpu_named
from train.costs.memory import launch_sharding
from train.parallel import malloc

DESCRIPTION = """\
Train an EAGLE-3 drafter for SSD (speculative speculative decoding) on text that the target wrote.

The first run computes the target's features and keeps them on disk. Ctrl-C saves the state; the same command goes on.
Writes to the recipe's `output`: metrics.jsonl, states/ to resume from, best-eagle3/ and final-eagle3/ to serve."""
EXAMPLES = """\
  accelerate launch train/eagle3_selfcond.py --config recipes/smollm2-135m/train.yaml
  ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train/eagle3_selfcond.py --config R   (CPU)
  python train/eagle3_selfcond.py --config R drafter.num_hidden_layers=2 output=runs/train/two-layers
  python train/eagle3_selfcond.py --config base.yaml --config variant.yaml   (a variant that names only what differs)
  python train/eagle3_selfcond.py --config R --dry-run --gpu H100 --launch recipes/accelerate/zero2.yaml   (costs)

Every setting of train/config.py can be given as key=value, stages as 'curriculum=[{steps: 100, depth: 3}]'."""


def main(argv: list[str]) -> int:
    """The command."""
    options = parse(argv)
    settings = load_settings(TrainSettings, options.config, options.overrides)
    if options.dry_run:
        return plan(settings, options)
    check_launch()
    import torch  # below the settings, so that a mistyped key is answered at once

    from train.monitor.console import Console
    from train.parallel.launch import rank, start_accelerator
    from train.trainer.feature_sources import Caller
    from train.trainer.loop import train
    from train.trainer.prepare import prepare

    here = rank()
    console = Console(speaks=here.rank == 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    device = f"cuda:{here.local_rank}" if torch.cuda.is_available() else "cpu"
    # A sharded target's parts belong to a process group; otherwise nothing of the preparation needs one, and nobody
    # waits in it.
    accelerator = start_accelerator() if settings.features.target == "sharded" else None
    setup = prepare(settings, Caller(device, here, options.yes, console.say, console.show))
    train(settings, setup, console, accelerator)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Options of the command; `overrides` are the key=value pairs."""
    examples = f"{EXAMPLES}\n\n{deprecated_names_help(TrainSettings)}"
    parser = CommandParser("train/eagle3_selfcond.py", DESCRIPTION, examples)
    recipe = "a YAML recipe, for example recipes/smollm2-135m/train.yaml; given again, the next one is laid on top"
    parser.add_argument("--config", required=True, action="append", metavar="RECIPE", help=recipe)
    parser.add_argument("--dry-run", action="store_true", help="print what the run would take, and load nothing")
    parser.add_argument(
        "--yes", action="store_true", help="write the feature store whatever its size, as long as the disk has room"
    )
    planning = parser.add_argument_group("with --dry-run")
    planning.add_argument(
        "--gpu", default="H100", metavar="NAME", help="plan for this GPU, or 'cpu' for this machine [H100]"
    )
    planning.add_argument(
        "--launch", metavar="FILE", help="as this accelerate config spreads it, such as recipes/accelerate/zero2.yaml"
    )
    planning.add_argument(
        "--ranks", type=int, metavar="N", help="on so many of them [the --launch file's num_processes, or 1]"
    )
    planning.add_argument(
        "--share", type=float, default=0.4, metavar="X", help="expected share of the device's matrix rate [0.4]"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
    return parser.parse_intermixed_args(argv)


def plan(settings: TrainSettings, options: argparse.Namespace) -> int:
    """Print what the run would take."""
    ranks, sharding = launch_sharding(options.launch)
    ranks = ranks if options.ranks is None else options.ranks
    if ranks < 1 or not 0 < options.share <= 1:
        raise UserError(
            f"--ranks = {ranks}, --share = {options.share}: at least one rank, and a share above 0 and at most 1"
        )
    if options.gpu != "cpu":
        gpu_named(options.gpu)
    from rich.console import Console

    from train.dry_run import Launch, dry_run

    launch = Launch(options.gpu, ranks, sharding, options.share)
    dry_run(settings, Path(options.config[0]), launch, Console(markup=False))
    return 0


def check_launch() -> None:
    """Refuse a launch that asked for several processes and started one: `accelerate launch --cpu` does that, and says
    nothing.
    """
    if "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        raise UserError(
            "`accelerate launch --cpu --num_processes N` starts one process only: "
            "use ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N"
        )


if __name__ == "__main__":
    malloc.set_up()
    sys.exit(run_command(main))
