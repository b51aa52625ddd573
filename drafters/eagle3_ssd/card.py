"""The drafter card: target, training data, settings, held-out figures, and the statistics that outcome policies use
(drafters/eagle3_ssd/README.md, section 2).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from drafters.base.errors import UserError
from drafters.base.settings import Settings

CARD_FILE = "drafter_card.json"


class OutcomeLaw(Settings):
    """The fitted law of outcomes (infer/draft/README.md, section 1).

    Each token is accepted with probability `a`; the bonus token is missed with probability min(1, A F^-r) at fan-out
    F, and always at F = 0.
    """

    a: float = Field(ge=0.0, le=1.0)
    r: float
    miss_rejected: float = Field(gt=0.0, description="A for k < K: the bonus token after a rejection")
    miss_accepted: float = Field(gt=0.0, description="A for k = K: the bonus token after full acceptance")


class Measured(Settings):
    """Measured tables: `reach[k]` = P(exactly k accepted), k = 0..K, and `recall[k][F-1]` = P(bonus token among the
    first F choices, given k).
    """

    reach: tuple[float, ...]
    recall: tuple[tuple[float, ...], ...]


class Confidence(Settings):
    """Calibration of drafted tokens: P(accepted) = sigmoid(slope * logit(the drafter's probability) + intercept).

    `calibration.py` fits it.
    """

    slope: float
    intercept: float


class DrafterCard(Settings):
    """The content of `drafter_card.json`, beside the weights.

    Serving refuses another tokenizer and warns about other differences (`checkpoint.check_fits`). A hash is None where
    the drafter was imported without its target.
    """

    target: str
    target_weight_hash: str | None
    tokenizer_hash: str | None
    template_hash: str | None
    template_options: dict[str, Any] = Field(default_factory=dict, description="see `drafters.targets.template`")
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
