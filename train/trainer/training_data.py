"""Training and held-out data: conversations read, split, rendered through the chat template, and packed into rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.chat.conversations import Conversation, read_conversations
from data.chat.pack import PackedRow, pack
from data.chat.render import Example, render_all
from data.manifest import MANIFEST_NAME, provenance, read_manifest
from drafters.base.errors import UserError
from drafters.targets.target import Target
from train.config import TrainSettings


class TrainingData(NamedTuple):
    """Rendered conversations to train on, the packed rows of both parts, and a description for the drafter card."""

    examples: Sequence[Example]
    training: list[PackedRow]
    heldout: list[PackedRow]
    description: dict[str, Any]


def prepare_data(settings: TrainSettings, target: Target, say: Callable[[str], None]) -> TrainingData:
    """Read `data.paths` and make rows of them. Says what is left out, and where the data do not fit the target.

    Raises `UserError` where nothing is left to train or to measure on. Rows do not depend on the seed: their features
    are shared between runs.
    """
    options, length = settings.data.template, settings.data.row_length
    conversations = [
        c for path in settings.data.paths for c in read_conversations(path, settings.data.max_conversations)
    ]
    kept, heldout = split(conversations, settings.data.heldout_conversations)
    for line in provenance(settings.data.paths, target.facts.name, target.facts.identity, options):
        say(f"warning: {line}")
    rendered, measured = (render_all(part, target.tokenizer, length, options) for part in (kept, heldout))
    for line in (rendered.rejected + measured.rejected + rendered.skipped)[:3]:
        say(f"left out: {line}")
    if not rendered.examples or not measured.examples:
        raise UserError(
            f"data.paths = {list(settings.data.paths)} leave nothing to train or to measure on; "
            "give more conversations"
        )
    rows = pack(rendered.examples, length)
    num_rejected = len(rendered.rejected) + len(measured.rejected)
    description = _describe(settings, rendered.examples, num_rejected, rows)
    return TrainingData(rendered.examples, rows, pack(measured.examples, length), description)


def split(conversations: Sequence[Conversation], heldout: int) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, by a hash of what was asked: no question stands on both sides."""

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
