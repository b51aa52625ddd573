"""The losses of the drafter's head, in chunks of rows: no [n, Vd] tensor outlives its chunk.

The one place that chooses an implementation: Triton on a GPU (`triton`), compiled rows on a CPU (`cpu`), else torch
(`closed_form`). Each computes a chunk's logits, what is counted of them, and the gradient over the logits; the
products that carry the gradient on to hidden states and head are here. `reference` has the definitions.

P positions with a teacher, n supervised predictions, C columns of `PredictionStats`, H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor

from train.ops.head_loss import closed_form, cpu
from train.ops.head_loss.reference import exact
from train.ops.head_loss.terms import HeadLosses, LossOptions, PredictionStats, Teacher
from train.ops.products import add_to, pad_rows


def head_losses(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    options: LossOptions,
) -> HeadLosses:
    """The sum over n predictions of base * (a * soft cross-entropy + b * total variation) + bonus * bonus loss.

    a and b are `options.cross_entropy` and `options.total_variation`; `base` and `bonus` weigh each prediction, None
    leaves the bonus loss out. Logits are `hidden @ head.T`, the teacher's row of prediction i is rows[i], `hidden` is
    what the head reads (after the norm). Equal to `reference.head_losses` in value and gradient; the gradient with
    respect to hidden and head is taken in the forward pass, chunk by chunk.
    """
    n = len(hidden_nH)
    hidden, rows, base = (pad_rows(tensor) for tensor in (hidden_nH, rows_n, base_n))
    bonus = None if bonus_n is None else pad_rows(bonus_n)
    loss, stats = _HeadLosses.apply(hidden, head_VH, teacher, rows, base, bonus, options)
    return HeadLosses(loss, stats[:n])


class LogitsHead(Protocol):
    """From the target's last hidden states [n, H] to its logits of the draft vocabulary, whose size is the `len`."""

    def __len__(self) -> int: ...

    def __call__(self, hidden_nH: Tensor, /) -> Tensor:
        """Logits [n, Vd], in the dtype of `hidden`."""
        ...


def teacher_probabilities(last_hidden_PH: Tensor, head: LogitsHead, log_normaliser_P: Tensor) -> Tensor:
    """fp16 [P, Vd]: the target's probabilities of the draft vocabulary, from its head of those tokens and its full
    log-normaliser.

    fp16 holds numbers in [0, 1] with eight times the precision of bf16. Shared by all depths, which only shift it.
    """
    hidden, log_normaliser = pad_rows(last_hidden_PH), pad_rows(log_normaliser_P)
    result = torch.empty(len(hidden), len(head), dtype=torch.float16, device=hidden.device)
    at_once = cpu.ROWS if hidden.device.type == "cpu" else closed_form.CHUNK
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        logits = head(hidden[part])
        if cpu.available(logits, result):
            cpu.probabilities(logits, log_normaliser[part].float().contiguous(), result[part])
        else:
            result[part] = (logits.float() - log_normaliser[part, None]).exp()
    return result[: len(last_hidden_PH)]


class _Backend(Protocol):
    """What `triton`, `cpu` and `closed_form` have in common."""

    def rows_at_once(self, vocab: int, bytes_each: int, /) -> int:
        """How many rows of logits to hold at a time."""
        ...

    def chunk(
        self,
        hidden_nH: Tensor,
        head_VH: Tensor,
        teacher: Teacher,
        rows_n: Tensor,
        base_n: Tensor,
        bonus_n: Tensor | None,
        options: LossOptions,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Columns of `PredictionStats` [n, C], and the gradient of the loss over the logits, [n, Vd] in the dtype of
        `hidden`.
        """
        ...


def _backend(hidden_nH: Tensor, teacher: Teacher, bonus_n: Tensor | None, options: LossOptions) -> _Backend:
    if hidden_nH.is_cuda and hidden_nH.dtype != torch.float64 and importlib.util.find_spec("triton"):
        from train.ops.head_loss import triton

        return triton
    if cpu.available(hidden_nH, teacher.probs) and (bonus_n is None or not options.bonus_temperature):
        return cpu
    return closed_form


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
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        weight = head.to(hidden.dtype)
        stats = torch.empty(
            len(hidden), len(PredictionStats._fields), device=hidden.device, dtype=exact(hidden[:0]).dtype
        )
        needs_grad = hidden.requires_grad or head.requires_grad
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_head = torch.zeros_like(head) if needs_grad else None
        way = _backend(hidden, teacher, bonus, options)
        at_once = way.rows_at_once(len(weight), hidden.element_size())
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            x = hidden[part]
            stats[part], grad = way.chunk(
                x, weight, teacher, rows[part], base[part], None if bonus is None else bonus[part], options
            )
            if grad_hidden is not None and grad_head is not None:
                grad_hidden[part] = grad @ weight
                add_to(grad_head, grad.T @ x)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(stats)
        each = PredictionStats(*stats.unbind(1))
        loss = (
            base * (options.cross_entropy * each.cross_entropy + options.total_variation * each.rejection)
        ).sum()  # a product `@` would be bf16 under autocast
        return (loss if bonus is None else loss + (bonus * each.bonus).sum()), stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_stats: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss.to(grad_hidden.dtype), grad_head * grad_loss, None, None, None, None, None
