"""Serving figures out of replayed rounds: tokens per round, retention, hit rate by budget, predicted speed, and the
statistics that serving plans its fan-outs with (train/README.md, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from drafters.eagle3_ssd import speed
from drafters.eagle3_ssd.calibration import Calibration, fit, reliability
from drafters.eagle3_ssd.card import Measured, OutcomeLaw
from drafters.eagle3_ssd.outcomes import (
    OutcomeStatistics,
    Policy,
    PowerLaw,
    fan_out,
    fit_power_law,
    geometric,
    uniform,
)
from train.config import HeldoutSettings
from train.validation.round_replay import FanOutPlan, Round, replay
from train.validation.served_drafting import AnswerSpan, ServedDrafter

RECALL_SIZES = range(1, 33)  # fan-outs that the outcome tables go to
SHOWN = 8  # of them, in the figures
BUCKET = 128  # tokens of the first bucket of positions; each further one is as long as all before it

Replayed = list[list[Round]]  # the rounds of each answer


class ServingFigures(NamedTuple):
    """`values` are flat numbers and lists for metrics and card; the rest is what serving plans with. None: no round to
    tell from.
    """

    values: dict[str, Any]
    law: OutcomeLaw | None
    fresh: Measured | None
    lagged: Measured | None
    confidence_fresh: Calibration | None
    confidence_lagged: Calibration | None


def measure_serving(
    serving_of: Callable[[int], ServedDrafter],
    answers: Sequence[AnswerSpan],
    positions_BT: Tensor,
    settings: HeldoutSettings,
    costs: speed.StepCosts,
) -> ServingFigures:
    """Replay the answers in SD and in SSD order. `serving_of(refresh)` gives the drafting side with so many refresh
    passes.

    SD: with each look-ahead up to K. SSD: first with the largest budget spread evenly and K tokens after a miss, which
    gives the tables that serving plans with; then with each policy, budget and refresh. The predicted speeds are over
    autoregressive decoding.
    """
    K, serving = settings.lookahead, serving_of(settings.refresh[0])
    even = uniform(K, max(settings.budgets))
    *sd, prepared_evenly = replay(
        serving, answers, [*(_synchronous(n, K) for n in range(1, K + 1)), FanOutPlan(even, even)]
    )
    rounds = _flat(prepared_evenly)
    after_miss, after_hit = ([r for r in rounds if r.served_by_hit is by_hit] for by_hit in (False, True))
    fresh, lagged = tables(after_miss, K), tables(after_hit, K)
    law = fit_law(rounds, K)
    policies = _plans(settings, law, fresh, lagged)
    entries: dict[str, list[dict[str, Any]]] = {}
    replays: dict[str, list[Replayed]] = {}
    found = replay(serving, answers, [plan for plans in policies.values() for plan in plans])
    for name in policies:
        replays[name], found = found[: len(settings.budgets)], found[len(settings.budgets) :]
        entries[name] = [
            _entry(*pair, settings.refresh[0], settings, costs)
            for pair in zip(settings.budgets, replays[name], strict=True)
        ]
    lagging = "measured" if "measured" in policies else "uniform"
    for refresh in settings.refresh[1:]:
        name = f"refresh {refresh}"
        replays[name] = replay(serving_of(refresh), answers, policies[lagging])
        entries[name] = [
            _entry(*pair, refresh, settings, costs) for pair in zip(settings.budgets, replays[name], strict=True)
        ]
    best, place = max(
        ((name, place) for name, line in entries.items() for place in range(len(line))),
        key=lambda at: entries[at[0]][at[1]]["predicted_speed"],
    )
    chosen = entries[best][place]
    sd_taus = [_tau(_flat(found)) for found in sd]
    sd_speeds = [speed.sd_over_ar(tau, costs.round_times(n, n, 1)) for n, tau in enumerate(sd_taus, start=1)]
    values = {
        "tau_fresh": sd_taus[-1],
        "rounds_fresh": len(_flat(sd[-1])),
        "sd": [
            {"lookahead": n, "tau": t, "predicted_speed": s}
            for n, (t, s) in enumerate(zip(sd_taus, sd_speeds, strict=True), start=1)
        ],
        "predicted_speed_sd": max(sd_speeds),
        "lagged": entries.pop(lagging),
        **entries,
        "best": {
            "policy": best,
            **{name: chosen[name] for name in ("budget", "refresh", "tau", "hit_rate", "retention")},
        },
        "predicted_speed": chosen["predicted_speed"],
        "acceptance_fresh": _by_place(_flat(sd[-1]), K),
        "acceptance_lagged": _by_place(after_hit, K),
        "recall_fresh": [row[:SHOWN] for row in fresh.recall] if fresh else [],
        "recall_lagged": [row[:SHOWN] for row in lagged.recall] if lagged else [],
        "law": law and law.model_dump(),
        "by_position": by_position(answers, sd[-1], replays[best][place], positions_BT),
        "costs": {"step_share": costs.step, "row_share": costs.row},
    }
    confidences = [confidence_pairs(part) for part in (_flat(sd[-1]), after_hit)]
    values["calibration"] = [[point._asdict() for point in reliability(*pairs)] for pairs in confidences]
    return ServingFigures(values, law, fresh, lagged, *(fit(*pairs) for pairs in confidences))


def tables(rounds: Sequence[Round], lookahead: int) -> Measured | None:
    """`reach[k]`: share of rounds with exactly k accepted; `recall[k][F-1]`: share of those with the bonus token in
    the top F.

    None without rounds. A k never reached takes the average recall of the others.
    """
    if not rounds:
        return None
    by_k = Counter(r.accepted for r in rounds)
    places = Counter((r.accepted, r.place) for r in rounds if r.place is not None)

    def recall(ks: Sequence[int]) -> tuple[float, ...]:
        found, row = 0, []
        for size in RECALL_SIZES:
            found += sum(places[k, size - 1] for k in ks)
            row.append(found / sum(by_k[k] for k in ks))
        return tuple(row)

    every = list(by_k)
    return Measured(
        reach=tuple(by_k[k] / len(rounds) for k in range(lookahead + 1)),
        recall=tuple(recall([k] if by_k[k] else every) for k in range(lookahead + 1)),
    )


def fit_law(rounds: Sequence[Round], lookahead: int) -> OutcomeLaw | None:
    """Fit acceptance `a` and the law of misses; None where the rounds do not determine them."""
    table = tables(rounds, lookahead)
    accepted = sum(r.accepted for r in rounds)
    judged = accepted + sum(r.accepted < lookahead for r in rounds)
    if table is None or not judged:
        return None
    fitted = fit_power_law([[1.0 - found for found in row] for row in table.recall])
    if fitted is None:
        return None
    return OutcomeLaw(a=accepted / judged, r=fitted.exponent, miss_rejected=fitted.inner, miss_accepted=fitted.last)


def confidence_pairs(rounds: Sequence[Round]) -> tuple[list[float], list[bool]]:
    """The drafter's probability of each token that was judged, and whether it was accepted; tokens behind a rejection
    are not judged.
    """
    confidences = [confidence for r in rounds for confidence in r.confidences]
    return confidences, [j < r.accepted for r in rounds for j in range(len(r.confidences))]


def by_position(
    answers: Sequence[AnswerSpan], fresh: Replayed, lagged: Replayed, positions_BT: Tensor
) -> list[dict[str, Any]]:
    """Tokens per round by where in the text the round stands: drafters are known to fail beyond the length they were
    trained to.
    """
    buckets: dict[int, tuple[list[Round], list[Round]]] = {}
    for answer, *both in zip(answers, fresh, lagged, strict=True):
        for which, rounds in enumerate(both):
            for r in rounds:
                number = (int(positions_BT[answer.row, r.slot]) // BUCKET).bit_length()
                buckets.setdefault(number, ([], []))[which].append(r)
    result = []
    for number, (sd, ssd) in sorted(buckets.items()):
        first, end = BUCKET * (1 << number >> 1), BUCKET << number
        taus = {"tau_fresh": _tau(sd) if sd else None, "tau_lagged": _tau(ssd) if ssd else None}
        result.append({"from": first, "to": end, "rounds": len(sd), **taus})
    return result


def retention_of(replayed: Replayed) -> speed.Interval | None:
    """Retention with its interval over answers."""
    hits = [[r for r in rounds if r.served_by_hit] for rounds in replayed]
    return speed.retention(
        [speed.PairedTokens(len(h), sum(r.accepted for r in h), sum(r.fresh for r in h)) for h in hits]
    )


def hit_rate_of(replayed: Replayed) -> float | None:
    """Hits over outcomes looked up; the first round of an answer looks nothing up."""
    looked_up = [r for rounds in replayed for r in rounds[1:]]
    return speed.hit_rate(sum(r.served_by_hit for r in looked_up), len(looked_up))


def _synchronous(length: int, lookahead: int) -> FanOutPlan:
    return FanOutPlan((0,) * (length + 1), (0,) * (lookahead + 1))


def _plans(
    settings: HeldoutSettings, law: OutcomeLaw | None, fresh: Measured | None, lagged: Measured | None
) -> dict[str, list[FanOutPlan]]:
    """Of each policy, a plan for each budget: `geometric` is the closed form, `measured` hands out by the tables."""
    lengths = (settings.fallback_lookahead or settings.lookahead, settings.lookahead)
    plans = {"uniform": [FanOutPlan(*(uniform(length, budget) for length in lengths)) for budget in settings.budgets]}
    power = PowerLaw(law.miss_rejected, law.miss_accepted, law.r) if law else None
    if law and power:
        plans["geometric"] = [
            FanOutPlan(*(geometric(length, budget, law.a, power) for length in lengths)) for budget in settings.budgets
        ]
    one_of, other = fresh or lagged, lagged or fresh
    if one_of and other:
        statistics = [
            OutcomeStatistics(law.a if law else None, power, table.reach, table.recall) for table in (one_of, other)
        ]
        after = list(zip(lengths, statistics, strict=True))
        plans["measured"] = [
            FanOutPlan(*(fan_out(Policy.GEOMETRIC, length, budget, s) for length, s in after))
            for budget in settings.budgets
        ]
    return plans


def _entry(
    budget: int, replayed: Replayed, refresh: int, settings: HeldoutSettings, costs: speed.StepCosts
) -> dict[str, Any]:
    rounds = _flat(replayed)
    tau_hit, tau_miss = (_tau([r for r in rounds if r.served_by_hit is by_hit]) for by_hit in (True, False))
    rate, kept = hit_rate_of(replayed) or 0.0, retention_of(replayed)
    times = costs.round_times(settings.lookahead, settings.fallback_lookahead or settings.lookahead, budget, refresh)
    return {
        "budget": budget,
        "refresh": refresh,
        "rounds": len(rounds),
        "hit_rate": rate,
        "tau": _tau(rounds),
        "tau_hit": tau_hit,
        "tau_miss": tau_miss,
        "retention": kept.value if kept else None,
        "retention_interval": [kept.low, kept.high] if kept else None,
        "predicted_speed": speed.ssd_over_ar(rate, tau_hit, tau_miss, times),
    }


def _by_place(rounds: Sequence[Round], lookahead: int) -> list[float | None]:
    return speed.acceptance_by_position([r.accepted for r in rounds], [r.offered for r in rounds], lookahead)


def _flat(replayed: Replayed) -> list[Round]:
    return [r for rounds in replayed for r in rounds]


def _tau(rounds: Sequence[Round]) -> float:
    """Tokens per round; 1 without rounds, as a plain step has."""
    return speed.tokens_per_round([r.accepted for r in rounds]) if rounds else 1.0
