"""Everything before the first step: data read and rendered, rows packed, target loaded, features stored, drafter
started.

Runs before the process group exists, so a process that fails here leaves nobody waiting in a collective. (A sharded
target is the exception: its forwards are collectives. Then every process takes the same number of them.)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data.chat.conversations import Conversation, read_conversations
from data.chat.pack import PackedRow, pack
from data.chat.render import Example, render_all
from data.manifest import MANIFEST_NAME, provenance, read_manifest
from drafters.base.errors import UserError
from drafters.eagle3_ssd.config import default_taps
from drafters.targets.target import Target, load_target
from train.config import TrainSettings
from train.parallel.launch import Rank, gathered
from train.target_features import store
from train.target_features.features import FeatureSource, KeptFeatures, OnlineFeatures
from train.target_features.store import StoredFeatures, StorePlan
from train.trainer.initialise import Start, start

Say = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]


class Caller(NamedTuple):
    """The process that prepares, and how it speaks. `agrees`: the user has agreed to a store of any size (--yes)."""

    device: str
    rank: Rank
    agrees: bool
    say: Say
    show: ShowProgress


class Prepared(NamedTuple):
    """What the training loop needs. `data` describes the data set for the card. The target's layers are there only if
    they run in it.
    """

    target: Target
    start: Start
    training: FeatureSource
    heldout: FeatureSource
    data: dict[str, Any]
    key: str


def prepare(settings: TrainSettings, caller: Caller) -> Prepared:
    """Prepare a run, in every process."""
    say, shards = caller.say, caller.rank.local_world if settings.features.target == "sharded" else 1
    try:
        Path(settings.features.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"features.directory = {settings.features.directory!r} cannot be made ({error}): name another one"
        ) from error
    target = load_target(settings.target, settings.dtype, caller.device, fuse_layers=False, shards=shards)
    conversations = [
        c for path in settings.data.paths for c in read_conversations(path, settings.data.max_conversations)
    ]
    kept, heldout = split(conversations, settings.data.heldout_conversations)
    options = settings.data.template
    for line in provenance(settings.data.paths, target.facts.name, target.facts.identity, options):
        say(f"warning: {line}")
    rendered, measured = (
        render_all(part, target.tokenizer, settings.data.row_length, options) for part in (kept, heldout)
    )
    for line in (rendered.rejected + measured.rejected + rendered.skipped)[:3]:
        say(f"left out: {line}")
    if not rendered.examples or not measured.examples:
        raise UserError(
            f"data.paths = {list(settings.data.paths)} leave nothing to train or to measure on; give more conversations"
        )
    first = start(
        settings.drafter, target, rendered.examples, settings.seed, Path(settings.features.directory) / "vocabularies"
    )
    taps = (
        settings.drafter.tap_hidden_states_ids
        or first.drafter.config.tap_hidden_states_ids
        or default_taps(len(target.layers))
    )
    rows = [
        pack(part.examples, settings.data.row_length) for part in (rendered, measured)
    ]  # not by seed: features and held-out rows are shared
    data = _describe(settings, rendered.examples, len(rendered.rejected) + len(measured.rejected), rows[0])
    data["draft_vocabulary_coverage"] = first.coverage
    say(
        f"data: {data['conversations']} conversations, {data['response_tokens']} response tokens in {data['rows']} rows"
    )
    for note in first.notes:
        say(note)
    key = _key(settings, target, rows[0])
    if settings.features.mode == "online":
        training, measured_on = online(settings, target, rows, taps)
        return Prepared(target, first, training, measured_on, data, key)
    training, measured_on = offline(settings, target, rows, taps, caller)
    bare = replace(target, model=None, head=target.head.bare())  # its layers are not needed any more
    return Prepared(bare, first, training, measured_on, data, key)


def split(conversations: Sequence[Conversation], heldout: int) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, by a hash of what was asked: the same question never stands on both sides."""

    def place(conversation: Conversation) -> bytes:
        asked = "\0".join(m["content"] for m in conversation.messages if m["role"] != "assistant")
        return hashlib.sha256(asked.encode()).digest()

    ordered = sorted(conversations, key=place)
    if len(ordered) <= heldout:
        raise UserError(
            f"data.heldout_conversations = {heldout}, but data.paths hold {len(ordered)} conversations; hold out fewer"
        )
    while heldout < len(ordered) and place(ordered[heldout]) == place(ordered[heldout - 1]):
        heldout += 1
    return ordered[heldout:], ordered[:heldout]


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
        store.begin(plans, options.max_gigabytes, agrees, caller.say)
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


def _describe(
    settings: TrainSettings, examples: Sequence[Example], num_rejected: int, rows: Sequence[PackedRow]
) -> dict[str, Any]:
    manifests = [Path(path) for path in settings.data.paths if (Path(path) / MANIFEST_NAME).is_file()]
    return {
        "paths": list(settings.data.paths),
        "conversations": len(examples),
        "rejected": num_rejected,
        "rows": len(rows),
        "response_tokens": sum(sum(example.loss_mask) for example in examples),
        "manifests": [read_manifest(place).model_dump(mode="json", exclude={"files"}) for place in manifests],
    }


def _key(settings: TrainSettings, target: Target, rows: Sequence[PackedRow]) -> str:
    """What a training state depends on, besides settings that may change on resuming (curriculum, learning rate, ...)."""
    parts = (
        settings.drafter.model_dump(),
        settings.seed,
        settings.batch.rows_per_step,
        store.store_key(target, rows, ()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
