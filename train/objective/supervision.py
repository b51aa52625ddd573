"""Supervision mask of the predictions, and the factors of their loss sums: pure functions.

Shapes: B rows, T positions, A anchors of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def supervised(document_ids_BT: Tensor, turn_ids_BT: Tensor, anchors_BA: Tensor, depth: int | Tensor) -> Tensor:
    """bool [B, A]: is the prediction of token p+2+depth from anchor p trained (train/README.md, section 2)?
    `depth` may differ by anchor.

    The predicted token carries the loss mask (turn >= 1), the turn has begun at or before p+1, and p, p+1 and the
    predicted token lie in one document. Turns are contiguous, so the turn of p+1 has to be the turn of the predicted
    token. Turn ids 0 0 1 1 1 0: anchor 1 is trained at depths 0 and 1 (tokens 3 and 4), anchor 0 never: at p+1 = 1 no
    turn has begun.
    """
    length = turn_ids_BT.shape[1]
    predicted = anchors_BA + 2 + depth
    inside = predicted < length

    def at(ids_BT: Tensor, places_BA: Tensor) -> Tensor:
        return ids_BT.gather(1, places_BA.clamp(max=length - 1))

    turn, document = at(turn_ids_BT, predicted), at(document_ids_BT, predicted)
    same_turn = (turn > 0) & (turn == at(turn_ids_BT, anchors_BA + 1))
    same_document = (document == at(document_ids_BT, anchors_BA + 1)) & (document == at(document_ids_BT, anchors_BA))
    return inside & same_turn & same_document


def loss_scales(weights: Sequence[float], all_d: Sequence[float], sampled_d: Sequence[float]) -> list[float]:
    """What multiplies each depth's loss SUM: weight_d / (all supervised (p, d)), times all_d / sampled_d.

    `all_d` counts the supervised anchors of each depth over all ranks and accumulation steps, `sampled_d` those really
    unrolled: a sample of anchors stands for all of them. So the gradient depends neither on padding nor on
    micro-batching nor on the world size.
    """
    total = sum(all_d)
    return [
        weight * every / (sampled * total) if sampled else 0.0
        for weight, every, sampled in zip(weights, all_d, sampled_d, strict=True)
    ]


def pooled_scales(
    weights: Sequence[float], tilt: Sequence[float], all_d: Sequence[float], sampled_d: Sequence[float]
) -> list[float]:
    """`loss_scales` where depths >= 1 are sampled as often as serving visits them: together they weigh what they weigh
    there.

    Among themselves they stand as sampled, each prediction times tilt_d. Depth 0 runs everywhere and stands for
    itself. Weights 1, 10 of depth 0 and 6 each of depths 1 and 2, sampled 10, 3, 1: 1/22, then 12/22 over 4
    predictions: 3/22 each.
    """
    total = sum(all_d)
    first = weights[0] * all_d[0] / (sampled_d[0] * total) if sampled_d[0] else 0.0
    deep = sum(weight * every for weight, every in zip(weights[1:], all_d[1:], strict=True))
    sampled = sum(t * number for t, number in zip(tilt[1:], sampled_d[1:], strict=True))
    return [first, *(t * deep / (sampled * total) if sampled else 0.0 for t in tilt[1:])]
