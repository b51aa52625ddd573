"""The drafter card: what a drafter was made for and from, how well it drafts, and what serving needs to plan with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from drafters.base.errors import UserError
from drafters.base.settings import Settings

CARD_FILE = "drafter_card.json"


class OutcomeLaw(Settings):
    """The fitted outcome law of `ssd.md` §3: position k accepted with probability `a`; miss(F) = min(1, A F^-r),
    miss(0) = 1.
    """

    a: float = Field(ge=0.0, le=1.0)
    r: float
    miss_rejected: float = Field(gt=0.0, description="A for k < K: the bonus token after a rejection")
    miss_accepted: float = Field(gt=0.0, description="A for k = K: the bonus token after full acceptance")


class Measured(Settings):
    """The measured twin: `reach[k]` = P(k accepted), k = 0..K; `recall[k][F-1]` = P(bonus token in the top F | k
    accepted).
    """

    reach: tuple[float, ...]
    recall: tuple[tuple[float, ...], ...]


class Confidence(Settings):
    """How drafted tokens fare: P(accepted) = sigmoid(slope * logit(the drafter's probability) + intercept), see
    `calibration.py`.
    """

    slope: float
    intercept: float


class DrafterCard(Settings):
    """Stored beside the weights as `drafter_card.json`. Serving warns where it does not fit, and refuses another
    tokenizer.

    A hash is None where a drafter was imported without its target: then nobody has compared it.
    """

    target: str
    target_weight_hash: str | None
    tokenizer_hash: str | None
    template_hash: str | None
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="of `drafters.targets.template`, as training rendered"
    )
    commit: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    heldout: dict[str, Any] = Field(default_factory=dict)
    lookahead: int = Field(gt=0, description="K of the held-out figures")
    trained_depth: int = Field(gt=0, description="drafter steps unrolled in training")
    trained_length: int = Field(gt=0, description="tokens of the longest packed row")
    law: OutcomeLaw | None = None
    measured_fresh: Measured | None = Field(default=None, description="after a miss answered by drafting now")
    measured_lagged: Measured | None = Field(default=None, description="after a cache hit")
    confidence_fresh: Confidence | None = Field(default=None, description="of tokens drafted from true features")
    confidence_lagged: Confidence | None = Field(default=None, description="of tokens served from the cache")


def write_card(directory: Path, card: DrafterCard) -> None:
    """Write `drafter_card.json` into `directory`."""
    (directory / CARD_FILE).write_text(json.dumps(card.model_dump(), indent=2) + "\n", encoding="utf-8")


def read_card(directory: Path) -> DrafterCard:
    """Read `drafter_card.json`; a missing or malformed one is a `UserError` that names the file and the field."""
    file = directory / CARD_FILE
    if not file.is_file():
        raise UserError(f"no such file: {file}; a drafter directory holds {CARD_FILE}, which training writes")
    try:
        return DrafterCard.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{file}: {'.'.join(str(part) for part in first['loc']) or 'content'}: {first['msg']}"
        ) from error
