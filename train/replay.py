"""Serving replayed on the drafter's teacher-forced unrolls: rounds in fresh (SD) and in lagged (SSD) order, greedy. Torch-free.

A round starts at slot p, the newest one with a true feature; x_{p+1} is the bonus token just committed. The drafter's step d at
anchor q predicts x_{q+2+d}. After a miss, token m = 1..K of the speculation is step m-1 at anchor p. After a hit it was drafted
under an older anchor: step s+m-1 at p-s, where the shift s is D_{r-1}(k')+1 (`ssd.md` §5). Branch k forks at glue step s+k
of the same anchor (at k = 0: step 0 at p, whose feature is true).
The glue pass of serving sees newer keys than these unrolls do, so lagged figures lean towards the pessimistic side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

TOP = 16  # tokens kept of each distribution


class Turn(NamedTuple):
    """One answer: `tokens[i]` is x_{i+1} of it, so tokens[0] is its first token, and slot i has x_{i+1} = tokens[i].

    `tops[q][d]` are the TOP likeliest tokens of step d at anchor q, best first.
    """

    tokens: Sequence[int]
    tops: Sequence[Sequence[Sequence[int]]]


class Round(NamedTuple):
    """One verification: tokens accepted, how many a fresh drafter gets at the same place, and where the outcome was found."""

    accepted: int
    fresh: int
    served_by_hit: bool
    place: int | None  # index of the bonus token among the candidates at k = accepted; None: beyond TOP


def replay_fresh(turn: Turn, lookahead: int) -> list[int]:
    """Tokens accepted in each round of synchronous drafting. Rounds that the end of the turn would cut are left out."""
    slot, rounds = 0, []
    while slot + 1 + lookahead < len(turn.tokens):
        accepted = _leading_hits(turn, slot, 0, lookahead)
        rounds.append(accepted)
        slot += accepted + 1
    return rounds


def replay_lagged(turn: Turn, lookahead: int, fan_fresh: Sequence[int], fan_lagged: Sequence[int], refreshed: bool) -> list[Round]:
    """The rounds of SSD with jit misses, branches given out as `fan_fresh` after a miss and as `fan_lagged` after a hit.

    `refreshed`: the glue features are exact (refresh = K), so the shift does not add up over a run of hits. A shift beyond the
    unrolled depth is cut to it.
    """
    deepest = len(turn.tops[0]) - 1
    slot, shift, rounds = 0, 0, []
    while slot + 1 + lookahead < len(turn.tokens):
        accepted = _leading_hits(turn, slot - shift, shift, lookahead)
        glue_shift = 0 if refreshed or accepted == 0 else shift
        candidates = list(turn.tops[slot - glue_shift][glue_shift + accepted])
        if accepted < lookahead:
            rejected = turn.tops[slot - shift][shift + accepted][0]
            candidates = [token for token in candidates if token != rejected]
        bonus = turn.tokens[slot + accepted + 1]
        place = candidates.index(bonus) if bonus in candidates else None
        rounds.append(Round(accepted, _leading_hits(turn, slot, 0, lookahead), shift > 0, place))
        fan = fan_lagged if shift else fan_fresh
        hit = place is not None and place < fan[accepted]
        shift = min(glue_shift + accepted + 1, deepest - lookahead) if hit else 0
        slot += accepted + 1
    return rounds


def _leading_hits(turn: Turn, anchor: int, first_step: int, lookahead: int) -> int:
    """How many of the tokens drafted by steps first_step.. at `anchor` are the turn's own, up to the first that is not."""
    for m in range(lookahead):
        if turn.tops[anchor][first_step + m][0] != turn.tokens[anchor + 1 + first_step + m]:
            return m
    return lookahead


class Tables(NamedTuple):
    """`reach[k]`: share of rounds with exactly k accepted; `recall[k][F-1]`: share of those with the bonus token in the top F."""

    reach: tuple[float, ...]
    recall: tuple[tuple[float, ...], ...]


def tables(rounds: Sequence[Round], lookahead: int) -> Tables | None:
    """Outcome tables of rounds; None where there are none. A k never reached takes the average recall of the others."""
    if not rounds:
        return None
    by_k = Counter(r.accepted for r in rounds)
    places = Counter((r.accepted, r.place) for r in rounds if r.place is not None)
    sizes = range(1, TOP)

    def share(ks: Sequence[int], size: int) -> float:
        found = sum(places[k, place] for k in ks for place in range(size))
        return found / sum(by_k[k] for k in ks)

    every = list(by_k)
    recall = tuple(tuple(share([k] if by_k[k] else every, size) for size in sizes) for k in range(lookahead + 1))
    return Tables(tuple(by_k[k] / len(rounds) for k in range(lookahead + 1)), recall)
