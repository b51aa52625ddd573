"""Losses on the drafter's distribution: pure functions of tensors.

Shapes: P positions with a teacher, n supervised predictions, H hidden, Vd draft vocabulary. Teacher probabilities are
exp(logit - log-normaliser over the FULL vocabulary): over the draft vocabulary they sum to less than one.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.targets.head import TargetHead
from train.ops import cpu_loss
from train.ops.cpu_train import add_to


def kl(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Soft cross-entropy [n] of the drafter against the teacher, over the draft vocabulary (EAGLE-3's loss)."""
    return -(_exact(teacher_nV) * _exact(logits_nV).log_softmax(-1)).sum(-1)


def acceptance(logits_nV: Tensor, teacher_nV: Tensor) -> Tensor:
    """Expected rejection [n]: 1 - sum min(p, q), which speculative sampling pays with (`training.md` §3)."""
    return 1.0 - torch.minimum(_exact(teacher_nV), _exact(logits_nV).softmax(-1)).sum(-1)


def bonus_greedy(logits_nV: Tensor, best_n: Tensor, inside_n: Tensor) -> Tensor:
    """What SSD caches, greedy, [n]: where the drafter's argmax x is not the target's argmax t, -log q~(t), q~ = q
    without x.

    `best` is t as a draft id, `inside` whether it has one: a bonus token outside the draft vocabulary cannot be
    cached, whatever the drafter says, and costs nothing here.
    """
    logits = _exact(logits_nV)
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
    logits, p = _exact(logits_nV), _exact(teacher_nV)
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


class Teacher(NamedTuple):
    """The target's predictions at P positions: probabilities of the draft vocabulary [P, Vd], and the argmax over all
    tokens [P].

    `best` is the argmax as a draft id, meaningless where `inside` is false: there the argmax has none.
    """

    probs: Tensor
    best: Tensor
    inside: Tensor


class Mix(NamedTuple):
    """What the base loss is made of, and how the bonus loss drafts: greedily, or by sampling at temperature 1.

    `fan_out` is the F that the figures count outcomes by.
    """

    kl: float
    acceptance: float
    bonus_temperature: int = 0
    fan_out: int = 4


class Figures(NamedTuple):
    """What is counted of each prediction. Rates over all predictions, of a greedy target where tokens are compared."""

    kl: Any
    rejection: Any  # expected, 1 - sum min(p, q)
    correct: Any  # the drafter's argmax is the target's
    listed: Any  # the target's argmax is in the top F: the outcome is cached after full acceptance
    found: Any  # it is not drafted, and in the top F of the rest: cached after a rejection
    missing: Any  # the target's mass outside the draft vocabulary
    bonus: Any  # the bonus loss, where it is trained


class HeadLosses(NamedTuple):
    """`loss` carries the gradient; `figures_nC` has the columns of `Figures`, detached."""

    loss: Tensor
    figures_nC: Tensor


def head_losses(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    mix: Mix,
) -> HeadLosses:
    """Sum over n of base * (mix.kl * kl + mix.acceptance * acceptance) + bonus * bonus_{greedy,sampled}.

    `base` and `bonus` weigh each prediction; None leaves the bonus loss out. Logits are `hidden @ head.T`, the
    teacher's row of prediction i is rows[i], `hidden` is what the head reads (after the norm). Equal to the plain
    losses above in value and gradient, in chunks: no [n, Vd] tensor outlives its chunk, since the gradient with
    respect to hidden and head is taken in closed form in the same pass.
    """
    n = len(hidden_nH)
    hidden, rows, base = (pad_rows(tensor) for tensor in (hidden_nH, rows_n, base_n))
    bonus = None if bonus_n is None else pad_rows(bonus_n)
    loss, figures = _HeadLosses.apply(hidden, head_VH, teacher, rows, base, bonus, mix)
    return HeadLosses(loss, figures[:n])


def pad_rows(tensor: Tensor) -> Tensor:
    """Zeros behind the rows, to a multiple of `PADDED`; the tensor itself where nothing is missing."""
    if len(tensor) % PADDED == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -len(tensor) % PADDED))


CHUNK = 128  # 128 x 8192 logits in fp32 are 4 MB: the passes over them stay in the cache
ROWS = 1024  # where a row stays in the cache by itself; fewer would add to the head's gradient more often
PADDED = 128  # rows of a product come in multiples: oneDNN compiles each number of rows anew, as long as it computes, and keeps MBs of it
TINY = 1e-37  # fp32 holds it: logits up to 85 apart are exact


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Teacher,
        rows: Tensor,
        base: Tensor,
        bonus: Tensor | None,
        mix: Mix,
    ) -> tuple[Tensor, Tensor]:
        weight = head.to(hidden.dtype)
        figures = torch.empty(len(hidden), len(Figures._fields), device=hidden.device, dtype=_exact(hidden[:0]).dtype)
        needs_grad = hidden.requires_grad or head.requires_grad
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_head = torch.zeros_like(head) if needs_grad else None
        way, at_once = _way(hidden, weight, teacher, bonus, mix)
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            x = hidden[part]
            figures[part], grad = way(
                x, weight, teacher, rows[part], base[part], None if bonus is None else bonus[part], mix
            )
            if grad_hidden is not None and grad_head is not None:
                grad_hidden[part] = grad @ weight
                add_to(grad_head, grad.T @ x)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(figures)
        each = Figures(*figures.unbind(1))
        loss = (
            base * (mix.kl * each.kl + mix.acceptance * each.rejection)
        ).sum()  # a product `@` would be bf16 under autocast
        return (loss if bonus is None else loss + (bonus * each.bonus).sum()), figures

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_figures: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss.to(grad_hidden.dtype), grad_head * grad_loss, None, None, None, None, None


class _Way(Protocol):
    """Figures [n, C] of n rows, and the gradient of their loss with respect to the logits, in the dtype of `hidden`."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher: Teacher,
        rows: Tensor,
        base: Tensor,
        bonus: Tensor | None,
        mix: Mix,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def _way(hidden: Tensor, weight: Tensor, teacher: Teacher, bonus: Tensor | None, mix: Mix) -> tuple[_Way, int]:
    """The fastest way that takes these tensors, and how many rows at once: Triton on a GPU, compiled rows on a CPU,
    else torch.
    """
    if hidden.is_cuda and hidden.dtype != torch.float64 and importlib.util.find_spec("triton"):
        from train.ops import fused_loss

        return fused_loss.fused_chunk, fused_loss.rows_at_once(len(weight), hidden.element_size())
    if cpu_loss.available(hidden, teacher.probs) and (bonus is None or not mix.bonus_temperature):
        return _by_rows, ROWS
    return _by_torch, CHUNK


def _by_torch(
    hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, base: Tensor, bonus: Tensor | None, mix: Mix
) -> tuple[Tensor, Tensor]:
    chunk = Teacher(_exact(teacher.probs[rows]), teacher.best[rows], teacher.inside[rows])
    figures, grad = _chunk(_exact(F.linear(hidden, weight)), chunk, base, bonus, mix)
    return figures, grad.to(hidden.dtype)


def _by_rows(
    hidden: Tensor, weight: Tensor, teacher: Teacher, rows: Tensor, base: Tensor, bonus: Tensor | None, mix: Mix
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    scales = torch.stack((base, torch.zeros_like(base) if bonus is None else bonus), dim=1).float()
    weights = cpu_loss.Weights(mix.kl, mix.acceptance, bonus is not None, mix.fan_out)
    return cpu_loss.loss_rows(
        logits, teacher.probs, rows, teacher.best[rows], teacher.inside[rows], scales, weights
    ), logits


def _chunk(z: Tensor, teacher: Teacher, base: Tensor, bonus: Tensor | None, mix: Mix) -> tuple[Tensor, Tensor]:
    """Figures [n, C] of one chunk, and the gradient of its loss with respect to the logits z.

    kl: d/dz = q sum(p) - p.  acceptance, with m = [q < p]: d/dz = -q (m - sum(q m)).
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
    grad = torch.mul(q, mass, out=buffer).sub_(p).mul_(base[:, None] * mix.kl)
    if mix.acceptance:
        q_below = q * (q < p)
        grad += (base[:, None] * mix.acceptance) * (q * q_below.sum(-1, keepdim=True) - q_below)
    bonus_loss = torch.zeros_like(rejection)
    if bonus is not None:
        top = torch.where((rank == 0)[:, None], teacher.best[:, None], z.argmax(-1, keepdim=True))
        parts = (z, q, log_normaliser, top)
        bonus_loss, bonus_grad = (
            _bonus_sampled(*parts, p) if mix.bonus_temperature else _bonus_greedy(*parts, teacher, rank)
        )
        grad += bonus_grad.mul_(bonus[:, None])
    found = (rank >= 1) & (rank <= mix.fan_out)
    missing = (1.0 - mass[:, 0]).clamp(min=0)
    return torch.stack(
        [cross_entropy, rejection, rank == 0, rank < mix.fan_out, found, missing, bonus_loss], dim=1
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


def _exact(x: Tensor) -> Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def teacher_probabilities(last_hidden_PH: Tensor, head: TargetHead, log_normaliser_P: Tensor) -> Tensor:
    """fp16 [P, Vd]: the target's probabilities of the draft vocabulary, from its head's rows and its full
    log-normaliser.

    fp16 holds numbers in [0, 1] with eight times the precision of bf16. Shared by all depths, which only shift it.
    """
    hidden, log_normaliser = pad_rows(last_hidden_PH), pad_rows(log_normaliser_P)
    result = torch.empty(len(hidden), len(head), dtype=torch.float16, device=hidden.device)
    at_once = ROWS if hidden.device.type == "cpu" else CHUNK
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        logits = head(hidden[part])
        if cpu_loss.available(logits, result):
            cpu_loss.probabilities(logits, log_normaliser[part].float().contiguous(), result[part])
        else:
            result[part] = (logits.float() - log_normaliser[part, None]).exp()
    return result[: len(last_hidden_PH)]
