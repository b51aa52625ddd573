"""Slot alignment of EAGLE-3: which token, feature and position a drafter step pairs (drafters/eagle3_ssd/README.md,
section 1).

Slot j pairs the embedding of token j+1 with the feature of position j, sits at rotary position j, and predicts token
j+2.

    tokens   x0 x1 x2 x3, with features h0 h1 h2 h3
    slot 0   (emb x1, h0) -> x2
    slot 1   (emb x2, h1) -> x3
    slot 2   (emb x3, h2) -> x4, the first new token

The first token has no slot that embeds it, and the newest feature waits for the token that follows it. Deeper steps
keep the rule: step d at anchor p stands for slot p+d, with the drafter's own output as its feature.
"""

from __future__ import annotations

from typing import NamedTuple

EMBED_AHEAD = 1
PREDICT_AHEAD = 2


class Slot(NamedTuple):
    """Positions of one drafter step: of the embedded token, its feature, its rotary angle and the predicted token."""

    embedded: int
    feature: int
    rotary: int
    predicted: int


def slot(anchor: int, depth: int = 0) -> Slot:
    """The positions of step `depth` at `anchor`; its feature is true at depth 0 and the drafter's own beyond.

    `slot(7)` is token 8 with feature 7, at rotary position 7, predicting token 9; `slot(7, 2)` is token 10 with the
    output of step 1, at rotary position 9, predicting token 11.
    """
    place = anchor + depth
    return Slot(place + EMBED_AHEAD, place, place, place + PREDICT_AHEAD)


def num_slots(num_features: int, num_tokens: int) -> int:
    """Number of complete slots, given the features of the first positions and the first tokens of a text.

    A slot needs its feature and the token after it: `num_slots(4, 5)` and `num_slots(5, 5)` are 4.
    """
    return max(0, min(num_features, num_tokens - EMBED_AHEAD))
