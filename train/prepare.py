"""Everything before the first step: data read and rendered, rows packed, target loaded, features stored, drafter started.

Runs before the process group exists, so a process that fails here leaves nobody waiting in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.conversations import Conversation, read_conversations
from data.manifest import MANIFEST_NAME, provenance, read_manifest
from data.pack import PackedRow, pack
from data.render import Example, render_all
from drafters.eagle3_ssd.config import default_taps
from drafters.errors import UserError
from drafters.targets import Target, load_target
from train.config import TrainSettings
from train.features import FeatureSource, OnlineFeatures, StoredFeatures, await_store, build_store, refuse_if_large, store_bytes, store_key
from train.initialise import Start, start

Say = Callable[[str], None]
ShowProgress = Callable[[str, int, int], None]


class Prepared(NamedTuple):
    """What the training loop needs. `data` describes the data set for the card."""

    target: Target
    start: Start
    training: FeatureSource
    heldout: FeatureSource
    data: dict[str, Any]
    key: str


def prepare(settings: TrainSettings, device: str, writes: bool, say: Say, show: ShowProgress) -> Prepared:
    """Prepare a run. `writes`: this process writes the feature store; the others wait for it."""
    target = load_target(settings.target, settings.dtype, device, fuse_layers=False)
    conversations = [c for path in settings.data.paths for c in read_conversations(path, settings.data.max_conversations)]
    kept, heldout = split(conversations, settings.data.heldout_conversations)
    options = settings.data.template
    for line in provenance(settings.data.paths, target.facts.name, target.facts.identity, options):
        say(f"warning: {line}")
    rendered, measured = (render_all(part, target.tokenizer, settings.data.row_length, options) for part in (kept, heldout))
    for line in (rendered.rejected + measured.rejected + rendered.skipped)[:3]:
        say(f"left out: {line}")
    if not rendered.examples or not measured.examples:
        raise UserError(f"data.paths = {list(settings.data.paths)} leave nothing to train or to measure on; give more conversations")
    first = start(settings.drafter, target, rendered.examples, settings.seed, Path(settings.features.directory) / "vocabularies")
    taps = settings.drafter.tap_hidden_states_ids or first.drafter.config.tap_hidden_states_ids or default_taps(len(target.layers))
    rows = [pack(part.examples, settings.data.row_length, settings.seed) for part in (rendered, measured)]
    data = _describe(settings, rendered.examples, len(rendered.rejected) + len(measured.rejected), rows[0])
    data["draft_vocabulary_coverage"] = first.coverage
    say(f"data: {data['conversations']} conversations, {data['response_tokens']} response tokens in {data['rows']} rows")
    for note in first.notes:
        say(note)
    sources = [_source(settings, target, part, taps, writes, say, show) for part in rows]
    return Prepared(target, first, sources[0], sources[1], data, _key(settings, target, rows[0]))


def split(conversations: Sequence[Conversation], heldout: int) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, by a hash of what was asked: the same question never stands on both sides."""

    def place(conversation: Conversation) -> bytes:
        asked = "\0".join(m["content"] for m in conversation.messages if m["role"] != "assistant")
        return hashlib.sha256(asked.encode()).digest()

    ordered = sorted(conversations, key=place)
    if len(ordered) <= heldout:
        raise UserError(f"data.heldout_conversations = {heldout}, but data.paths hold {len(ordered)} conversations; hold out fewer")
    while heldout < len(ordered) and place(ordered[heldout]) == place(ordered[heldout - 1]):
        heldout += 1
    return ordered[heldout:], ordered[:heldout]


def _source(
    settings: TrainSettings, target: Target, rows: list[PackedRow], taps: Sequence[int], writes: bool, say: Say, show: ShowProgress
) -> FeatureSource:
    options = settings.features
    if options.mode == "online":
        return OnlineFeatures(target, rows, taps)
    directory = Path(options.directory)
    place = directory / f"{store_key(target, rows, taps)}-{options.rows_per_shard}"
    if not writes:
        await_store(place)
        return StoredFeatures(place)
    num_bytes = store_bytes(len(rows), settings.data.row_length, target.facts.hidden_size)
    say(f"target features of {len(rows)} rows: {num_bytes / 1e9:.2f} GB in {place}")
    refuse_if_large(num_bytes, options.max_gigabytes)
    build_store(directory, target, rows, taps, options.rows_per_shard, options.rows_per_forward, lambda d, t: show("target features", d, t))
    return StoredFeatures(place)


def _describe(settings: TrainSettings, examples: Sequence[Example], num_rejected: int, rows: Sequence[PackedRow]) -> dict[str, Any]:
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
    parts = (settings.drafter.model_dump(), settings.seed, settings.batch.rows_per_step, store_key(target, rows, ()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
