"""How often serving visits each drafter depth: a Markov chain of shifts from the drafter's own figures. Torch-free.

The staleness recursion is that of infer/draft/README.md, section 3; the weights are train/README.md, section 3.

A speculation is known by its shift s: its token m = 1..K was drafted at depth s+m-1 (s = 0 after a miss). With k of
them accepted, the outcome is looked for at depth D(k) = s+k, or k where a true feature or a refresh pass reaches (D(0)
= 0); a hit serves shift D(k)+1.

    K = 3: JIT drafts at depths 0 1 2; all accepted and hit: D = 3, the next one drafts at 4 5 6;
           1 of it accepted and hit: D = 5, the next one drafts at 6 7 8
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from drafters.base.serving import ServingSettings
from train.config import LossSettings

MEMORY = 0.98  # what is left of a step's counts one step later: figures of the last 50 steps or so
SQUARINGS = 9  # 512 rounds: the chain starts anew at each miss, so it has mixed long before


DepthCounts = tuple[
    tuple[float, ...], ...
]  # for each depth: predictions, correct, listed, found; plain numbers, so that a state holds it


class Rates(NamedTuple):
    """Greedy figures by depth: the argmax is right; the target's argmax is in the top F; it is rejected and in the top
    F of the rest.
    """

    correct: Sequence[float]
    listed: Sequence[float]
    found: Sequence[float]


class DepthVisits(NamedTuple):
    """Rates per round of serving. `drafts[d]`: tokens drafted at depth d, and bonus tokens after full acceptance,
    which the same loss trains; `forks[d]`: rounds that reach a fork k < K there.
    """

    drafts: list[float]
    forks: list[float]
    shifts: list[float]  # share of the rounds that verify a speculation of shift 0, 1, ..
    reach: list[list[float]]  # reach[s][k]: P(at least k accepted | shift s), k = 0..K
    refresh: int


class DepthWeights(NamedTuple):
    """Weights of the base loss and of the bonus loss at depths 0..depth."""

    base: list[float]
    bonus: list[float]


def depth_weights(settings: LossSettings, serving: ServingSettings, depth: int, tally: DepthCounts) -> DepthWeights:
    """`decay`: gamma^d; `flat`: 1; `visited`: as often as serving visits a depth, with mean 1 for the base loss.

    Under `visited` the bonus loss is weighted by how often a round reaches a fork at that depth, in the same unit, a
    round.
    """
    if settings.depth_weights != "visited":
        weights = [settings.gamma**d if settings.depth_weights == "decay" else 1.0 for d in range(depth + 1)]
        return DepthWeights(weights, weights)
    seen = serving_visits(serving, max(0, depth - serving.lookahead), tally)
    unit = (depth + 1) / sum(seen.drafts[: depth + 1])
    return DepthWeights(*([unit * value for value in values[: depth + 1]] for values in (seen.drafts, seen.forks)))


def serving_visits(serving: ServingSettings, max_shift: int, tally: DepthCounts) -> DepthVisits:
    """What serving visits by the drafter's own figures."""
    lookahead = serving.lookahead
    return visits(rates(tally, max_shift + lookahead + 1), lookahead, max_shift, serving.refresh)


def remember(tally: DepthCounts, counts: Sequence[Sequence[float]]) -> DepthCounts:
    """The tally after one more step, whose counts by depth are sums over all processes."""
    depths = max(len(tally), len(counts))
    empty = (0.0,) * 4
    before = [*tally, *[empty] * (depths - len(tally))]
    new = [*counts, *[empty] * (depths - len(counts))]
    return tuple(
        tuple(MEMORY * old + value for old, value in zip(*row, strict=True)) for row in zip(before, new, strict=True)
    )


def rates(tally: DepthCounts, depths: int) -> Rates:
    """Rates at `depths` depths. Nothing measured counts as one half; a depth not measured yet is taken like the one
    before it.
    """
    row, rows = (0.5, 0.5, 0.25), []
    for depth in range(depths):
        if depth < len(tally) and tally[depth][0] > 0:
            number, correct, listed, found = tally[depth]
            row = ((correct + 1) / (number + 2), (listed + 1) / (number + 2), (found + 0.5) / (number + 2))
        rows.append(row)
    return Rates(*zip(*rows, strict=True))


def visits(rates: Rates, lookahead: int, max_shift: int, refresh: int = 0) -> DepthVisits:
    """The long run of serving with K = `lookahead`; shifts beyond `max_shift` are cut to it. `rates` go to depth
    max_shift + K.

    Acceptances along a speculation are taken as independent.
    """
    reach = [_reach(rates, shift, lookahead) for shift in range(max_shift + 1)]
    shifts = _long_run([_next_shift(rates, reach[shift], shift, max_shift, refresh) for shift in range(max_shift + 1)])
    drafts, forks = [0.0] * (max_shift + lookahead + 1), [0.0] * (max_shift + lookahead + 1)
    for shift, share in enumerate(shifts):
        for k in range(lookahead):
            drafts[shift + k] += share
            forks[fork_depth(shift, k, refresh)] += share * reach[shift][k]
        drafts[fork_depth(shift, lookahead, refresh)] += share * reach[shift][lookahead]
    return DepthVisits(drafts, forks, shifts, reach, refresh)


def fork_depth(shift: int, k: int, refresh: int = 0) -> int:
    """D(k): drafter steps since a true feature at fork k of a round whose speculation has this shift."""
    return k if k <= refresh else shift + k


def _next_shift(rates: Rates, reach: Sequence[float], shift: int, max_shift: int, refresh: int) -> list[float]:
    """P(the next round's shift) after a round at `shift`."""
    after, lookahead = [0.0] * (max_shift + 1), len(reach) - 1
    for k in range(lookahead + 1):
        outcome = reach[k] - (reach[k + 1] if k < lookahead else 0.0)
        fork = fork_depth(shift, k, refresh)
        hit = _hit(rates, fork, k == lookahead)
        after[min(fork + 1, max_shift)] += outcome * hit
        after[0] += outcome * (1 - hit)
    return after


def _long_run(transition: list[list[float]]) -> list[float]:
    """The distribution after 2^SQUARINGS rounds that began with a miss."""
    for _ in range(SQUARINGS):
        columns = list(zip(*transition, strict=True))
        transition = [
            [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in transition
        ]
    return transition[0]


def _reach(rates: Rates, shift: int, lookahead: int) -> list[float]:
    values = [1.0]
    for m in range(lookahead):
        values.append(values[-1] * rates.correct[shift + m])
    return values


def _hit(rates: Rates, fork: int, all_accepted: bool) -> float:
    """P(the outcome is cached), at depth `fork`; after a rejection, given the rejection."""
    if all_accepted:
        return rates.listed[fork]
    rejected = 1.0 - rates.correct[fork]
    return min(1.0, rates.found[fork] / rejected) if rejected > 0 else 0.0
