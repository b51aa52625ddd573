"""The slot alignment of EAGLE-3, stated once (`ssd.md` §5 counts from 1; here everything counts from 0).

Slot j pairs the embedding of token j+1 with the feature of position j, sits at rotary position j, and predicts token
j+2.

    position   0     1     2     3        tokens  x0 x1 x2 x3
    slot 0:  (emb x1, h0) -> x2           slot 1: (emb x2, h1) -> x3       slot 2: (emb x3, h2) -> x4, the first new token

The first token has no slot that embeds it, and the newest feature waits for the token that follows it. Drafting one
step further keeps the rule: step d at anchor p stands for slot p+d, with the drafter's own output as its feature.
"""

from __future__ import annotations

from typing import NamedTuple

EMBED_AHEAD = 1
PREDICT_AHEAD = 2


class Slot(NamedTuple):
    """Which positions one drafter step touches."""

    embedded: int
    feature: int
    rotary: int
    predicted: int


def slot(anchor: int, depth: int = 0) -> Slot:
    """The positions of step `depth` at `anchor`: `feature` is where its feature belongs, true at depth 0 and drafted
    beyond.

    `slot(7)` is token 8 with feature 7, at rotary position 7, predicting token 9; `slot(7, 2)` is token 10 with the
    output of step 1, at rotary position 9, predicting token 11.
    """
    place = anchor + depth
    return Slot(place + EMBED_AHEAD, place, place, place + PREDICT_AHEAD)


def num_slots(num_features: int, num_tokens: int) -> int:
    """How many slots are complete, given features of positions 0.. and tokens 0..: each needs its feature and the
    token after it.
    """
    return max(0, min(num_features, num_tokens - EMBED_AHEAD))
