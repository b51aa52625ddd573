"""Held-out figures: per depth, and of serving replayed in its own order (train/README.md, section 4).

Shapes: B rows, T positions, n supervised predictions, P positions with a teacher, F candidates, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.card import Confidence
from drafters.eagle3_ssd.model import Eagle3Drafter
from drafters.eagle3_ssd.speed import StepCosts
from drafters.eagle3_ssd.vocab import VocabMap
from drafters.targets.target import Target
from infer.kernels.linear.fused import fuse
from infer.kernels.linear.packed import pack
from train.config import HeldoutSettings
from train.objective.objective import Objective, choose_anchors, needs_teacher, predictions
from train.objective.unroll import Rows, unroll
from train.ops.head_loss.reference import soft_cross_entropy, total_variation
from train.target_features.features import Features, FeatureSource
from train.validation.served_drafting import AnswerSpan, ServedDrafter, TrueSlots, true_slots
from train.validation.serving_figures import ServingFigures, measure_serving

RECALL_SIZES = range(1, 9)
GREEDY_SHARE = 0.93  # of an answer's tokens that are the argmax: written greedily, near-ties of batch shapes aside
ROW_SHARE = {
    "cpu": 0.03,
    "cuda": 0.003,
}  # arithmetic over reading, for one row: 30 rows double a step on a CPU core, 300 on a GPU
CHUNK = 256  # predictions that logits are made for at a time


class HeldoutFigures(NamedTuple):
    """Held-out figures: `values` are flat numbers and lists for metrics and card, `serving` has what serving plans
    with.
    """

    values: dict[str, Any]
    serving: ServingFigures

    @property
    def speed(self) -> float:
        """The predicted speed over autoregressive decoding: what the best checkpoint is chosen by."""
        return float(self.values["predicted_speed"])

    def for_serving(self) -> dict[str, Any]:
        """The fields of the drafter card that serving plans with."""
        serving = self.serving
        confidences = (serving.confidence_fresh, serving.confidence_lagged)
        fresh, lagged = (Confidence(**c._asdict()) if c else None for c in confidences)
        return {
            "law": serving.law,
            "measured_fresh": serving.fresh,
            "measured_lagged": serving.lagged,
            "confidence_fresh": fresh,
            "confidence_lagged": lagged,
        }


@torch.no_grad()
def measure(
    objective: Objective,
    vocab: VocabMap,
    source: FeatureSource,
    settings: HeldoutSettings,
    rows_per_forward: int,
    costs: StepCosts,
) -> HeldoutFigures:
    """Measure the drafter on (at most `max_rows` of) the held-out rows.

    Chained figures are greedy serving's: they use `max_answers` of those that were written greedily, or of all where
    there is none.
    """
    drafter = as_served(objective.drafter, objective.dtype)
    sums, parts, answers = [], [], []
    for first in range(0, min(len(source), settings.max_rows), rows_per_forward):
        numbers = range(first, min(first + rows_per_forward, len(source), settings.max_rows))
        features = Features(*(tensor.to(objective.draft_to_target.device) for tensor in source.batch(numbers)))
        rows = Rows(features.token_ids, features.positions, features.document_ids)
        fused = drafter.fuse(features.taps.to(objective.dtype))
        sums.append(_depth_sums(objective, drafter, vocab, features, rows, fused, settings))
        parts.append((rows, true_slots(drafter, rows, fused)))
        answers += find_answers(features, first)
    greedy = [answer for answer, is_greedy in answers if is_greedy] or [answer for answer, _ in answers]
    replayed = greedy[: settings.max_answers]
    rows, slots = _joined(parts)

    def serving_of(refresh: int) -> ServedDrafter:
        return ServedDrafter(drafter, vocab, rows, slots, settings.lookahead, refresh)

    serving = measure_serving(serving_of, replayed, rows.positions, settings, costs)
    counts = {"answers": len(answers), "answers_replayed": len(replayed)}
    return HeldoutFigures({**depth_figures(torch.stack(sums).sum(0)), **counts, **serving.values}, serving)


def as_served(drafter: Eagle3Drafter, dtype: torch.dtype) -> Eagle3Drafter:
    """A copy with its matrices in `dtype`, as they are written, and laid out as serving does. The target's embeddings
    are shared.
    """
    embeddings = drafter.embed_tokens.weight
    served = copy.deepcopy(drafter, {id(embeddings): embeddings})
    for parameter in served.parameters():
        if parameter is not embeddings and parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    for module in list(served.modules()):
        fuse(module, ("q_proj", "k_proj", "v_proj"))
        fuse(module, ("gate_proj", "up_proj"))
    pack(served)
    return served


def step_costs(settings: HeldoutSettings, drafter: Eagle3Drafter, target: Target) -> StepCosts:
    """The settings' costs of a drafter step, or those that follow from the sizes: decoding reads all weights once for
    each step.
    """
    read_by_drafter = (
        sum(map(_size, drafter.parameters())) - _size(drafter.embed_tokens.weight) - _size(drafter.fc.weight)
    )
    by_size = StepCosts(read_by_drafter / target.weights_read, ROW_SHARE.get(target.device.type, ROW_SHARE["cuda"]))
    step, row = settings.step_share, settings.row_share
    return StepCosts(by_size.step if step is None else step, by_size.row if row is None else row)


def depth_figures(sums: Tensor) -> dict[str, Any]:
    """Averages per depth out of `_depth_sums`."""
    number = sums[:, 0].clamp(min=1)
    rejected = (sums[:, 0] - sums[:, 3]).clamp(min=1)
    return {
        "predictions": int(sums[0, 0]),
        "loss": (sums[:, 1] / number).tolist(),
        "acceptance": (sums[:, 2] / number).tolist(),
        "accuracy": (sums[:, 3] / number).tolist(),
        "recall_after_rejection": (sums[:, 4:] / rejected[:, None]).tolist(),
    }


def find_answers(features: Features, first_row: int = 0) -> list[tuple[AnswerSpan, bool]]:
    """The answers of some rows, which count from `first_row`; each with whether it was written greedily."""
    result = []
    for row, (documents, turns) in enumerate(zip(features.document_ids, features.turn_ids, strict=True)):
        labels = torch.stack((documents, turns), dim=1)
        for label in labels[turns > 0].unique(dim=0):
            places = (labels == label).all(-1).nonzero()[:, 0]
            first, last = int(places[0]), int(places[-1])
            if first == 0 or documents[first - 1] != documents[first]:
                continue  # no slot before its first token
            written, likeliest = features.token_ids[row, first : last + 1], features.argmax[row, first - 1 : last]
            is_greedy = (written == likeliest).double().mean() >= GREEDY_SHARE
            result.append((AnswerSpan(first_row + row, first, last), bool(is_greedy)))
    return result


def _depth_sums(
    objective: Objective,
    drafter: Eagle3Drafter,
    vocab: VocabMap,
    features: Features,
    rows: Rows,
    fused_BTH: Tensor,
    settings: HeldoutSettings,
) -> Tensor:
    """fp64 [depth + 1, 4 + 8]: number, loss, acceptance, argmax hits, and hits of the top 1..8 after a rejection."""
    needed = needs_teacher(features)
    teacher = objective.teacher(features, needed).probs
    teacher_row = needed.flatten().cumsum(0).view_as(needed) - 1
    row_keys = [str(tokens.tolist()) for tokens in features.token_ids]
    anchors, depth = (
        choose_anchors(features, settings.anchors_per_row, row_keys),
        settings.depth or 2 * settings.lookahead,
    )
    sums = []
    for d, hidden in enumerate(unroll(drafter, rows, fused_BTH, anchors.places, depth, objective.settings.window)):
        row, slot = predictions(features, anchors, d).nonzero(as_tuple=True)
        place = (slot if d == 0 else anchors.places[row, slot]) + d + EMBED_AHEAD
        of_depth = torch.zeros(4 + len(RECALL_SIZES), dtype=torch.float64, device=row.device)
        for part in torch.arange(len(row), device=row.device).split(CHUNK):
            at = (row[part], place[part])
            logits = drafter.logits(hidden[row[part], slot[part]]).float()
            of_depth += _prediction_sums(logits, teacher[teacher_row[at]], vocab, features.argmax[at])
        sums.append(of_depth.cpu())
    return torch.stack(sums)


def _prediction_sums(logits_nV: Tensor, teacher_nV: Tensor, vocab: VocabMap, argmax_n: Tensor) -> Tensor:
    size = min(RECALL_SIZES[-1] + 1, logits_nV.shape[1])
    agrees = vocab.to_target(logits_nV.topk(size).indices) == argmax_n[:, None]
    found_after_rejection = agrees[:, 1:].cumsum(-1) > 0
    recall = [found_after_rejection[:, min(width, size - 1) - 1].sum() for width in RECALL_SIZES]
    accepted = len(logits_nV) - total_variation(logits_nV, teacher_nV).sum()
    number = torch.tensor(float(len(logits_nV)), device=logits_nV.device)
    return torch.stack(
        [number, soft_cross_entropy(logits_nV, teacher_nV).sum(), accepted, agrees[:, 0].sum(), *recall]
    ).double()


def _joined(parts: Sequence[tuple[Rows, TrueSlots]]) -> tuple[Rows, TrueSlots]:
    rows, slots = zip(*parts, strict=True)
    layers = range(len(slots[0].keys_BMDT))
    joined = TrueSlots(
        torch.cat([s.outputs_BTH for s in slots]),
        [torch.cat([s.keys_BMDT[layer] for s in slots]) for layer in layers],
        [torch.cat([s.values_BMTD[layer] for s in slots]) for layer in layers],
    )
    return Rows(*(torch.cat(field) for field in zip(*rows, strict=True))), joined


def _size(weight: Tensor | nn.Parameter) -> int:
    return int(
        getattr(weight, "ds_numel", weight.numel())
    )  # under DeepSpeed's third stage a weight's own size is its shard's
