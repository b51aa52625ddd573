"""The head's losses in plain torch, from their definitions: the truth that every faster implementation is tested
against.

A new loss starts here (train/README.md, section 3). Teacher probabilities are exp(logit - log-normaliser over the FULL
vocabulary): over the draft vocabulary they sum to less than one.

P positions with a teacher, n supervised predictions, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from train.ops.head_loss.terms import HeadLosses, LossOptions, PredictionStats, Teacher

TINY = 1e-37  # fp32 holds it: logits up to 85 apart are exact


def head_losses(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    options: LossOptions,
) -> HeadLosses:
    """See `op.head_losses`: all logits at once, gradients by autograd."""
    logits = F.linear(hidden_nH, head_VH.to(hidden_nH.dtype))
    p, best, inside = (part[rows_n] for part in teacher)
    cross_entropy, rejection = soft_cross_entropy(logits, p), total_variation(logits, p)
    each = options.cross_entropy * cross_entropy + options.total_variation * rejection
    loss, bonus = (base_n * each).sum(), torch.zeros_like(rejection)
    if bonus_n is not None:
        bonus = bonus_sampled(logits, p) if options.bonus_temperature else bonus_greedy(logits, best, inside)
        loss = loss + (bonus_n * bonus).sum()
    rank = (logits > logits.gather(-1, best[:, None])).sum(-1)
    rank = torch.where(inside, rank, logits.shape[-1])  # how many tokens the drafter prefers to the target's argmax
    found = (rank >= 1) & (rank <= options.fan_out)
    missing = (1.0 - exact(p).sum(-1)).clamp(min=0)
    stats = PredictionStats(cross_entropy, rejection, rank == 0, rank < options.fan_out, found, missing, bonus)
    return HeadLosses(loss, torch.stack([column.to(rejection.dtype) for column in stats], dim=1).detach())


def soft_cross_entropy(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Soft cross-entropy [n] of the drafter against the teacher, over the draft vocabulary (EAGLE-3's loss)."""
    return -(exact(teacher_nV) * exact(logits_nV).log_softmax(-1)).sum(-1)


def total_variation(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Total variation distance [n]: 1 - sum min(p, q), the probability that speculative sampling rejects
    (train/README.md, section 3).
    """
    return 1.0 - torch.minimum(exact(teacher_nV), exact(logits_nV).softmax(-1)).sum(-1)


def bonus_greedy(logits_nV: Tensor, best_n: Tensor, inside_n: Tensor) -> Tensor:
    """What SSD caches, greedy, [n]: where the drafter's argmax x is not the target's argmax t, -log q~(t), q~ = q
    without x.

    `best` is t as a draft id, `inside` whether it has one: a bonus token outside the draft vocabulary cannot be
    cached, whatever the drafter says, and costs nothing here.
    """
    logits = exact(logits_nV)
    drafted = logits.argmax(-1, keepdim=True)
    counts = inside_n & (drafted[:, 0] != best_n)
    without = logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool).scatter(-1, drafted, True), -torch.inf)
    place = torch.where(counts, best_n, (drafted[:, 0] + 1) % logits.shape[-1])  # any finite one where nothing counts
    return -without.log_softmax(-1).gather(-1, place[:, None])[:, 0] * counts


def bonus_sampled(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """What SSD caches, at temperature 1, [n]: the mean over drafted tokens x ~ q of P(x rejected) * (- sum_t r(t) log
    q~(t)).

    x is drawn and rejected with probability max(q(x) - p(x), 0); r = norm(max(p - q, 0)) over the FULL vocabulary,
    where the mass outside the draft vocabulary is residual that nobody can cache; q~(t) = q(t) / (1 - q(x)). No
    gradient through the first two.
    """
    logits, p = exact(logits_nV), exact(teacher_nV)
    log_q = logits.log_softmax(-1)
    with torch.no_grad():
        rejected, r = rejection_and_residual(p, log_q.exp())
    top = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.argmax(-1, keepdim=True), True)
    log_rest_of_top = logits.masked_fill(top, -torch.inf).logsumexp(-1, keepdim=True) - logits.logsumexp(
        -1, keepdim=True
    )
    log_rest = torch.where(
        top, log_rest_of_top, torch.log1p(-log_q.exp().masked_fill(top, 0.0))
    )  # log(1 - q) would lose the top's
    return -rejected.sum(-1) * (r * log_q).sum(-1) + r.sum(-1) * (rejected * log_rest).sum(-1)


def rejection_and_residual(p_nV: Tensor, q_nV: Tensor) -> tuple[Tensor, Tensor]:
    """P(x is drawn from q, then rejected) for each x, and r, both [n, Vd]; r sums to less than 1 where p has mass
    elsewhere.
    """
    missing = (1.0 - p_nV.sum(-1, keepdim=True)).clamp(min=0)
    residual = (p_nV - q_nV).clamp(min=0)
    return (q_nV - p_nV).clamp(min=0), residual / (residual.sum(-1, keepdim=True) + missing).clamp(min=TINY)


def exact(x: Tensor) -> Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()
