"""What is measured on held-out data: figures per depth, and chained figures of serving from joint hits (`training.md` §4).

Shapes: B rows, T positions, A anchors of a row, n supervised predictions, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.card import Measured, OutcomeLaw
from drafters.eagle3_ssd.outcomes import OutcomeStatistics, Policy, fan_out, fit_power_law, uniform
from drafters.eagle3_ssd.speed import RoundTimes, ssd_over_ar
from drafters.eagle3_ssd.vocab import VocabMap
from train.config import HeldoutSettings
from train.features import Features, FeatureSource
from train.losses import acceptance, kl, teacher_probabilities
from train.objective import Objective, choose_anchors, predictions
from train.replay import TOP, Round, Tables, Turn, replay_fresh, replay_lagged, tables
from train.unroll import Rows, unroll

RECALL_SIZES = range(1, 9)
GREEDY_SHARE = 0.93  # of an answer's tokens that are the target's argmax: written greedily, but for near-ties of another batch shape


@dataclass(frozen=True)
class Figures:
    """Held-out figures. `values` are flat numbers and lists for metrics and card; the rest is what serving plans with."""

    values: dict[str, Any]
    law: OutcomeLaw | None
    fresh: Measured | None
    lagged: Measured | None

    @property
    def speed(self) -> float:
        """The predicted speed over autoregressive decoding: what the best checkpoint is chosen by."""
        return float(self.values["predicted_speed"])


@torch.no_grad()
def measure(objective: Objective, vocab: VocabMap, source: FeatureSource, settings: HeldoutSettings, rows_per_forward: int) -> Figures:
    """Measure the drafter on (at most `max_rows` of) the held-out rows."""
    depth = settings.depth or 3 * settings.lookahead
    device = objective.target_head.device
    sums, turns = torch.zeros(depth + 1, 4 + len(RECALL_SIZES), dtype=torch.float64), []
    for first in range(0, min(len(source), settings.max_rows), rows_per_forward):
        numbers = range(first, min(first + rows_per_forward, len(source), settings.max_rows))
        features = Features(*(tensor.to(device) for tensor in source.batch(numbers)))
        batch = _unroll_batch(objective, vocab, features, depth)
        sums += batch.sums
        turns += _turns(features, batch.tops)
    return summarise(sums, turns, settings)


class _Batch(NamedTuple):
    sums: Tensor  # fp64 [depth + 1, 4 + 8]: number, loss, acceptance, argmax hits, recall@1..8 hits
    tops: Tensor  # int64 [B, T, depth + 1, TOP] target ids, zero where a prediction is not supervised


def _unroll_batch(objective: Objective, vocab: VocabMap, features: Features, depth: int) -> _Batch:
    drafter = objective.drafter
    anchors = choose_anchors(features, None, [""] * len(features.token_ids))
    sums = torch.zeros(depth + 1, 4 + len(RECALL_SIZES), dtype=torch.float64)
    tops = torch.zeros(*features.token_ids.shape, depth + 1, TOP, dtype=torch.int64)
    device = features.token_ids.device.type
    with torch.autocast(device, objective.dtype, enabled=objective.dtype != torch.float32):
        fused = drafter.fuse(features.taps.to(objective.dtype))
        rows = Rows(features.token_ids, features.positions, features.document_ids)
        for d, hidden in enumerate(unroll(drafter, rows, fused, anchors.places, depth, objective.settings.window)):
            row, slot = predictions(features, anchors, d).nonzero(as_tuple=True)
            anchor = slot if d == 0 else anchors.places[row, slot]
            place = anchor + d + EMBED_AHEAD
            for part in torch.arange(len(row), device=row.device).split(256):
                logits = drafter.logits(hidden[row[part], slot[part]]).float()
                at = (row[part], place[part])
                teacher = teacher_probabilities(features.last_hidden[at], objective.target_head, features.log_normaliser[at])
                best = vocab.to_target(logits.topk(min(TOP, logits.shape[-1])).indices)
                sums[d] += _depth_sums(logits, teacher, best, features.argmax[at])
                tops[row[part].cpu(), anchor[part].cpu(), d, : best.shape[-1]] = best.cpu()
    return _Batch(sums, tops)


def _depth_sums(logits_nV: Tensor, teacher_nV: Tensor, best_nF: Tensor, argmax_n: Tensor) -> Tensor:
    """Number, loss, acceptance, argmax hits; then for the rejected ones the hits of the top F without the rejected token."""
    agrees = best_nF == argmax_n[:, None]
    found_after_rejection = agrees[:, 1:].cumsum(-1) > 0
    recall = [found_after_rejection[:, min(size, best_nF.shape[-1] - 1) - 1].sum() for size in RECALL_SIZES]
    accepted = len(logits_nV) - acceptance(logits_nV, teacher_nV).sum()
    number = torch.tensor(float(len(logits_nV)), device=logits_nV.device)
    return torch.stack([number, kl(logits_nV, teacher_nV).sum(), accepted, agrees[:, 0].sum(), *recall]).double().cpu()


def _turns(features: Features, tops: Tensor) -> list[tuple[Turn, bool]]:
    """The answers of a batch, each with whether it was written greedily."""
    result = []
    for row in range(len(tops)):
        turn_ids, documents = features.turn_ids[row], features.document_ids[row]
        labels = torch.stack((documents, turn_ids), dim=1)
        for label in labels[turn_ids > 0].unique(dim=0):
            places = (labels == label).all(-1).nonzero()[:, 0]
            first, last = int(places[0]), int(places[-1])
            if first == 0 or documents[first - 1] != documents[first]:
                continue  # no slot before its first token
            tokens = features.token_ids[row, first : last + 1]
            is_greedy = (features.argmax[row, first - 1 : last] == tokens).double().mean() >= GREEDY_SHARE
            result.append((Turn(tokens.tolist(), tops[row, first - 1 : last].tolist()), bool(is_greedy)))
    return result


def summarise(sums: Tensor, turns: Sequence[tuple[Turn, bool]], settings: HeldoutSettings) -> Figures:
    """Figures from the sums per depth and the answers. Chained figures use the greedy answers, or all where there is none."""
    number = sums[:, 0].clamp(min=1)
    rejected = (sums[:, 0] - sums[:, 3]).clamp(min=1)
    values: dict[str, Any] = {
        "predictions": int(sums[0, 0]),
        "loss": (sums[:, 1] / number).tolist(),
        "acceptance": (sums[:, 2] / number).tolist(),
        "accuracy": (sums[:, 3] / number).tolist(),
        "recall_after_rejection": (sums[:, 4:] / rejected[:, None]).tolist(),
    }
    greedy = [turn for turn, is_greedy in turns if is_greedy] or [turn for turn, _ in turns]
    chained = chain(greedy, settings)
    values.update(answers=len(turns), answers_replayed=len(greedy))
    return Figures({**values, **chained.values}, chained.law, chained.fresh, chained.lagged)


def chain(turns: Sequence[Turn], settings: HeldoutSettings) -> Figures:
    """tau fresh, tau lagged, retention, hit rate against budget and predicted speed, from serving replayed on the unrolls.

    Retention: over rounds served by a hit, tokens of the served speculation over tokens of a fresh one at the same places.
    The predicted speed takes the best of the budgets, though the background time given is the same for all: give budgets that fit.
    """
    lookahead = settings.lookahead
    fresh_rounds = [accepted for turn in turns for accepted in replay_fresh(turn, lookahead)]
    values: dict[str, Any] = {"tau_fresh": _tau(fresh_rounds), "predicted_speed": 0.0}
    wide = uniform(lookahead, (lookahead + 1) * (TOP - 1))
    first = [r for turn in turns for r in replay_lagged(turn, lookahead, wide, wide, refreshed=False)]
    after_miss = _measured(tables([r for r in first if not r.served_by_hit], lookahead))
    after_hit = _measured(tables([r for r in first if r.served_by_hit], lookahead))
    law = _law(first, lookahead)
    values["law"] = law.model_dump() if law else None
    best = None
    for name, refreshed in (("lagged", False), ("refreshed", True)):
        values[name] = []
        for budget in settings.budgets:
            fans = [_fan(table, lookahead, budget) for table in (after_miss or after_hit, after_hit or after_miss)]
            entry = _lagged_figures([replay_lagged(turn, lookahead, *fans, refreshed=refreshed) for turn in turns], fans, settings)
            values[name].append({"budget": budget, **entry})
            best = max(best or 0.0, entry["predicted_speed"])
    values["predicted_speed"] = best or 0.0
    return Figures(values, law, after_miss, after_hit)


def _lagged_figures(replays: Sequence[Sequence[Round]], fans: Sequence[Sequence[int]], settings: HeldoutSettings) -> dict[str, float]:
    rounds = [r for replay in replays for r in replay]
    hits = [r for r in rounds if r.served_by_hit]
    misses = [r for r in rounds if not r.served_by_hit]
    found = sum(r.place is not None and r.place < fans[r.served_by_hit][r.accepted] for r in rounds)
    rate = found / max(1, len(rounds))
    tau_hit, tau_miss = _tau([r.accepted for r in hits]), _tau([r.accepted for r in misses])
    times = RoundTimes(settings.verify_ms, settings.verify_ms, 0.0, settings.background_ms, settings.fallback_ms)
    return {
        "rounds": len(rounds),
        "hit_rate": rate,
        "tau": _tau([r.accepted for r in rounds]),
        "tau_hit": tau_hit,
        "tau_miss": tau_miss,
        "retention": tau_hit / _tau([r.fresh for r in hits]),
        "predicted_speed": ssd_over_ar(rate, tau_hit, tau_miss, times),
    }


def _tau(accepted: Sequence[int]) -> float:
    """Tokens per round, the bonus token included; 1 without rounds, as a plain step has."""
    return 1.0 + sum(accepted) / max(1, len(accepted))


def _measured(table: Tables | None) -> Measured | None:
    return None if table is None else Measured(reach=table.reach, recall=table.recall)


def _fan(table: Measured | None, lookahead: int, budget: int) -> tuple[int, ...]:
    if table is None:
        return uniform(lookahead, budget)
    return fan_out(Policy.GEOMETRIC, lookahead, budget, OutcomeStatistics(reach=table.reach, recall=table.recall))


def _law(rounds: Sequence[Round], lookahead: int) -> OutcomeLaw | None:
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
