"""Everything before the first step: target loaded, data rendered and packed, drafter started, features stored.

Runs before the process group exists, so a process that fails here leaves nobody waiting in a collective. (A sharded
target is the exception: its forwards are collectives. Then every process takes the same number of them.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from data.chat.pack import PackedRow
from drafters.eagle3_ssd.config import default_taps
from drafters.targets.target import Target, load_target
from train.config import TrainSettings
from train.target_features import store
from train.target_features.features import FeatureSource
from train.trainer.feature_sources import Caller, make_directory, offline, online
from train.trainer.initialise import Start, start
from train.trainer.training_data import prepare_data


class TrainingSetup(NamedTuple):
    """What the training loop needs. `data` describes the data set for the card. The target's layers are there only if
    they run in it.
    """

    target: Target
    start: Start
    training: FeatureSource
    heldout: FeatureSource
    data: dict[str, Any]
    key: str


def prepare(settings: TrainSettings, caller: Caller) -> TrainingSetup:
    """Prepare a run, in every process."""
    shards = caller.rank.local_world if settings.features.target == "sharded" else 1
    directory = make_directory(settings)
    target = load_target(settings.target, settings.dtype, caller.device, fuse_layers=False, shards=shards)
    data = prepare_data(settings, target, caller.say)
    first = start(settings.drafter, target, data.examples, settings.seed, directory / "vocabularies")
    taps = (
        settings.drafter.tap_hidden_states_ids
        or first.drafter.config.tap_hidden_states_ids
        or default_taps(len(target.layers))
    )
    about = {**data.description, "draft_vocabulary_coverage": first.coverage}
    caller.say(
        f"data: {about['conversations']} conversations, {about['response_tokens']} response tokens "
        f"in {about['rows']} rows"
    )
    for note in first.notes:
        caller.say(note)
    key, rows = _key(settings, target, data.training), (data.training, data.heldout)
    if settings.features.mode == "online":
        return TrainingSetup(target, first, *online(settings, target, rows, taps), about, key)
    sources = offline(settings, target, rows, taps, caller)
    without_layers = replace(target, model=None, head=target.head.bare())  # the layers have done their part
    return TrainingSetup(without_layers, first, *sources, about, key)


def _key(settings: TrainSettings, target: Target, rows: Sequence[PackedRow]) -> str:
    """What a training state depends on; curriculum, learning rate and the like may change on resuming."""
    parts = (
        settings.drafter.model_dump(),
        settings.seed,
        settings.batch.rows_per_step,
        store.store_key(target, rows, ()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
