"""The head's losses of a chunk of rows in torch, with the gradient over the logits in closed form.

The implementation for tensors that neither `cpu` nor `triton` takes; it needs no graph, so nothing of the size of the
logits outlives its chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from train.ops.head_loss.reference import TINY, exact, rejection_and_residual
from train.ops.head_loss.terms import LossOptions, Teacher

CHUNK = 128  # 128 x 8192 logits in fp32 are 4 MB: the passes over them stay in the cache


def rows_at_once(vocab: int, bytes_each: int) -> int:
    """How many rows of logits to hold at a time."""
    del vocab, bytes_each
    return CHUNK


def chunk(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Columns of `PredictionStats` [n, C], and the gradient of the loss over the logits, [n, Vd] in the dtype of
    `hidden`.
    """
    own = Teacher(exact(teacher.probs[rows_n]), teacher.best[rows_n], teacher.inside[rows_n])
    stats, grad = of_logits(exact(F.linear(hidden_nH, head_VH)), own, base_n, bonus_n, options)
    return stats, grad.to(hidden_nH.dtype)


def of_logits(
    z: Tensor, teacher: Teacher, base: Tensor, bonus: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Columns of `PredictionStats` [n, C] of one chunk, and the gradient of its loss with respect to the logits z.

    Cross-entropy: d/dz = q sum(p) - p.  Total variation, with m = [q < p]: d/dz = -q (m - sum(q m)).
    """
    p, buffer = teacher.probs, torch.empty_like(z)
    q = z.softmax(-1)
    log_normaliser = (z.amax(-1) - q.amax(-1).log())[:, None]
    mass = p.sum(-1, keepdim=True)
    cross_entropy = (mass * log_normaliser)[:, 0] - torch.mul(p, z, out=buffer).sum(-1)
    rejection = 1.0 - torch.minimum(p, q, out=buffer).sum(-1)
    above = torch.gt(z, z.gather(-1, teacher.best[:, None]), out=buffer).sum(
        -1
    )  # a sum of floats: of booleans it takes four times as long
    rank = torch.where(teacher.inside, above, z.shape[-1])
    grad = torch.mul(q, mass, out=buffer).sub_(p).mul_(base[:, None] * options.cross_entropy)
    if options.total_variation:
        q_below = q * (q < p)
        grad += (base[:, None] * options.total_variation) * (q * q_below.sum(-1, keepdim=True) - q_below)
    bonus_loss = torch.zeros_like(rejection)
    if bonus is not None:
        top = torch.where((rank == 0)[:, None], teacher.best[:, None], z.argmax(-1, keepdim=True))
        parts = (z, q, log_normaliser, top)
        bonus_loss, bonus_grad = (
            _bonus_sampled(*parts, p) if options.bonus_temperature else _bonus_greedy(*parts, teacher, rank)
        )
        grad += bonus_grad.mul_(bonus[:, None])
    found = (rank >= 1) & (rank <= options.fan_out)
    missing = (1.0 - mass[:, 0]).clamp(min=0)
    return torch.stack(
        [cross_entropy, rejection, rank == 0, rank < options.fan_out, found, missing, bonus_loss], dim=1
    ), grad


def _bonus_greedy(
    z: Tensor, q: Tensor, log_normaliser: Tensor, top: Tensor, teacher: Teacher, rank: Tensor
) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient: q~ minus one at t, nothing at x."""
    counts = (teacher.inside & (rank > 0))[:, None]
    q_rest = q.scatter(-1, top, 0.0)
    rest = q_rest.sum(-1, keepdim=True).clamp(min=TINY)
    value = counts * (rest.log() + log_normaliser - z.gather(-1, teacher.best[:, None]))
    grad = q_rest.mul_(counts / rest)
    return value[:, 0], grad.scatter_add_(-1, teacher.best[:, None], -counts.to(grad.dtype))


def _bonus_sampled(z: Tensor, q: Tensor, log_normaliser: Tensor, top: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Value [n] and gradient. With w = rejected, u = w / (1 - q): d/dz_s = sum(r) q_s (sum(u) - u_s) - sum(w) r_s.

    The top's 1 - q is the sum of the others, and its u is kept apart: it may be larger than all others by more than
    fp32 holds.
    """
    rejected, r = rejection_and_residual(p, q)
    drawn, cacheable = rejected.sum(-1, keepdim=True), r.sum(-1, keepdim=True)
    rest = (1.0 - q).scatter_(-1, top, q.scatter(-1, top, 0.0).sum(-1, keepdim=True)).clamp_(min=TINY)
    value = drawn * (cacheable * log_normaliser - (r * z).sum(-1, keepdim=True)) + cacheable * (
        rejected * rest.log()
    ).sum(-1, keepdim=True)
    u = rejected / rest
    u_top = u.gather(-1, top)
    u.scatter_(-1, top, 0.0)
    others = u.sum(-1, keepdim=True)
    return value[:, 0], cacheable * q * (others - u + u_top).scatter_(-1, top, others) - drawn * r
