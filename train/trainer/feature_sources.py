"""Where the loop reads target features from: stores on disk that all processes complete, or the target itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data.chat.pack import PackedRow
from drafters.base.errors import UserError
from drafters.targets.target import Target
from train.config import TrainSettings
from train.parallel.launch import Rank, gathered
from train.target_features import store
from train.target_features.features import FeatureSource, KeptFeatures, OnlineFeatures
from train.target_features.store import StoredFeatures, StorePlan

Say = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]


class Caller(NamedTuple):
    """The process that prepares, and how it speaks. `agrees`: the user has agreed to a store of any size (--yes)."""

    device: str
    rank: Rank
    agrees: bool
    say: Say
    show: ShowProgress


def make_directory(settings: TrainSettings) -> Path:
    """`features.directory`, made where it is missing. Raises `UserError` where that cannot be."""
    directory = Path(settings.features.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"features.directory = {str(directory)!r} cannot be made ({error}): name another one"
        ) from error
    return directory


def online(
    settings: TrainSettings, target: Target, rows: Sequence[Sequence[PackedRow]], taps: Sequence[int]
) -> tuple[FeatureSource, FeatureSource]:
    """Features computed as they are needed, for training and for measuring."""
    training, heldout = (OnlineFeatures(target, part, taps) for part in rows)
    if settings.features.target == "sharded":
        return training, KeptFeatures(
            heldout, min(len(heldout), settings.heldout.max_rows), settings.features.rows_per_forward
        )
    return training, heldout


def offline(
    settings: TrainSettings, target: Target, rows: Sequence[Sequence[PackedRow]], taps: Sequence[int], caller: Caller
) -> tuple[FeatureSource, FeatureSource]:
    """Features in stores on disk, completed by all processes together; for training and for measuring."""
    options, rank = settings.features, caller.rank
    share = (rank.local_rank, rank.local_world) if options.per_node else (rank.rank, rank.world)
    plans = [store.plan_store(Path(options.directory), target, part, taps, options.rows_per_shard) for part in rows]

    def agrees(question: str) -> bool:
        return caller.agrees or ask(question)

    if share[0] == 0:
        store.write_indices(plans, options.max_gigabytes, agrees, caller.say)
    for plan in plans:
        store.await_index(plan)

        def show(done: int, total: int) -> None:
            caller.show("target features", done, total)

        if options.target == "sharded":
            missing = all_missing(plan, rank, options.per_node)
            store.build_together(plan, target, options.rows_per_forward, missing, share, show)
        else:
            store.build_share(plan, target, options.rows_per_forward, share, show)
        store.await_shards(plan, show)
    training, heldout = (StoredFeatures(plan.place) for plan in plans)
    return training, heldout


def all_missing(plan: StorePlan, rank: Rank, per_node: bool) -> list[int]:
    """Shards that any process which shares the store does not see: one list for all of them. Collective."""
    node = rank.rank // rank.local_world
    found = gathered((node, plan.missing))
    return sorted({number for where, missing in found if where == node or not per_node for number in missing})


def ask(question: str) -> bool:
    """Ask in the terminal; without one the answer is no."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
