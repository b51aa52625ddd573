"""Losses on the drafter's distribution, the supervision rule and the depth weights: pure functions of tensors.

Shapes: B rows, T positions, A anchors of a row, P positions with a teacher, n supervised predictions, H hidden, Vd draft vocabulary.
Teacher probabilities are exp(logit - log-normaliser over the FULL vocabulary): over the draft vocabulary they sum to less than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def kl(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Soft cross-entropy [n] of the drafter against the teacher, over the draft vocabulary (EAGLE-3's loss)."""
    return -(teacher_nV.float() * logits_nV.float().log_softmax(-1)).sum(-1)


def acceptance(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Expected rejection [n]: 1 - sum min(p, q), which speculative sampling pays with (`training.md` §3)."""
    return 1.0 - torch.minimum(teacher_nV.float(), logits_nV.float().softmax(-1)).sum(-1)


class LossSums(NamedTuple):
    """Sums over n predictions, scalars. Only `loss` carries a gradient."""

    loss: Tensor
    kl: Tensor
    rejection: Tensor
    correct: Tensor


def head_losses(
    hidden_nH: Tensor, head_VH: Tensor, teacher_PV: Tensor, rows_n: Tensor, kl_weight: float, acceptance_weight: float
) -> LossSums:
    """Sum over n of kl_weight * kl + acceptance_weight * acceptance of `hidden @ head.T` against `teacher[rows]`.

    Equal to the plain losses above in value and gradient, in chunks: no [n, Vd] tensor outlives its chunk, since the gradient
    with respect to hidden and head is taken in closed form in the same pass. `hidden` is what the head reads (after the norm).
    `correct` counts predictions whose argmax equals the teacher's argmax inside the draft vocabulary.
    """
    loss, others = _HeadLosses.apply(hidden_nH, head_VH, teacher_PV, rows_n, kl_weight, acceptance_weight)
    return LossSums(loss, *others.unbind())


CHUNK = 128  # 128 x 8192 logits in fp32 are 4 MB: the passes over them stay in the cache


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, teacher: Tensor, rows: Tensor, kl_weight: float, acceptance_weight: float) -> Any:
        weight = head.to(hidden.dtype)
        sums = torch.zeros(4, device=hidden.device, dtype=torch.float32)
        needs_grad = hidden.requires_grad or head.requires_grad
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_head = torch.zeros_like(head) if needs_grad else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            x, p = hidden[part], teacher[rows[part]].float()
            chunk_sums, grad = _chunk(F.linear(x, weight).float(), p, kl_weight, acceptance_weight)
            sums += chunk_sums
            if grad_hidden is not None and grad_head is not None:
                grad = grad.to(hidden.dtype)
                grad_hidden[part] = grad @ weight
                grad_head += grad.T @ x
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(others := sums[1:].clone())
        return sums[0].clone(), others

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_others: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss.to(grad_hidden.dtype), grad_head * grad_loss, None, None, None, None


def _chunk(z: Tensor, p: Tensor, kl_weight: float, acceptance_weight: float) -> tuple[Tensor, Tensor]:
    """Sums [loss, kl, rejection, correct] of one chunk, and d loss / d z.

    kl: d/dz = q sum(p) - p.  acceptance, with m = [q < p]: d/dz = -q (m - sum(q m)).
    """
    log_normaliser = z.logsumexp(-1, keepdim=True)
    mass = p.sum(-1, keepdim=True)
    cross_entropy = (mass * log_normaliser).sum() - torch.vdot(p.flatten(), z.flatten())
    q = (z - log_normaliser).exp_()
    rejection = len(z) - torch.minimum(p, q).sum()
    correct = (z.argmax(-1) == p.argmax(-1)).sum()
    grad = kl_weight * (q * mass - p)
    if acceptance_weight:
        q_below = q * (q < p)
        grad += acceptance_weight * (q * q_below.sum(-1, keepdim=True) - q_below)
    return torch.stack([kl_weight * cross_entropy + acceptance_weight * rejection, cross_entropy, rejection, correct.float()]), grad


def teacher_probabilities(last_hidden_PH: Tensor, head_VH: Tensor, log_normaliser_P: Tensor) -> Tensor:
    """fp16 [P, Vd]: the target's probabilities of the draft vocabulary, from its sliced head and its full log-normaliser.

    fp16 holds numbers in [0, 1] with eight times the precision of bf16. Shared by all depths, which only shift it.
    """
    result = torch.empty(len(last_hidden_PH), len(head_VH), dtype=torch.float16, device=last_hidden_PH.device)
    for start in range(0, len(last_hidden_PH), CHUNK):
        part = slice(start, start + CHUNK)
        logits = F.linear(last_hidden_PH[part], head_VH.to(last_hidden_PH.dtype)).float()
        result[part] = (logits - log_normaliser_P[part, None]).exp()
    return result


def supervised(document_ids_BT: Tensor, turn_ids_BT: Tensor, anchors_BA: Tensor, depth: int) -> Tensor:
    """bool [B, A]: is the prediction of token p+2+depth from anchor p trained? (`training.md` §2)

    The predicted token carries the loss mask (turn >= 1), the turn has begun at or before p+1, and p, p+1 and the predicted
    token lie in one document. Turns are contiguous, so the turn of p+1 has to be the turn of the predicted token.
    Turn ids 0 0 1 1 1 0: anchor 1 is trained at depths 0 and 1 (tokens 3 and 4), anchor 0 never: at p+1 = 1 no turn has begun.
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


def depth_weights(kind: str, depths: int, gamma: float) -> list[float]:
    """Weight of each depth 0..depths-1: `decay` gives gamma^d, `flat` gives 1."""
    return [gamma**depth if kind == "decay" else 1.0 for depth in range(depths)]


def loss_scales(weights: Sequence[float], all_d: Sequence[float], sampled_d: Sequence[float]) -> list[float]:
    """What multiplies each depth's loss SUM: weight_d / (all supervised (p, d)), times all_d / sampled_d.

    `all_d` counts the supervised anchors of each depth over all ranks and accumulation steps, `sampled_d` those really
    unrolled: a sample of anchors stands for all of them. So the gradient depends neither on padding nor on micro-batching nor
    on the world size.
    """
    total = sum(all_d)
    return [
        weight * every / (sampled * total) if sampled else 0.0 for weight, every, sampled in zip(weights, all_d, sampled_d, strict=True)
    ]
