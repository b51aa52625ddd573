"""Attention of training that keeps no scores: the backward pass computes them again from the softmax's normaliser.

A step keeps queries, keys, values and output only, so that memory does not grow with row length times depth. The
products are torch's. What lies between them, the softmax with the anchors' own keys and its gradient, are two
functions: in torch below, and compiled for CPUs in `infer.kernels`. Anchors in order, as the slots of a row are, go
through in blocks: a block leaves out the slots after it.

Shapes: B rows, T slots of a row, A anchors, Q queries of an anchor, S = A Q, N query heads, M key-value heads, G = N /
M, R = G A Q, D head dimension, I own keys of an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.ops import cpu_attention

BLOCK = 128  # anchors


class Span(NamedTuple):
    """What is seen: step-0 slots start..stop-1 of each anchor, int64 [B, A], and own keys, bool [B or 1, A or 1, Q,
    I].

    Without `own` an anchor has one query, which sees all its own keys.
    """

    start: Tensor
    stop: Tensor
    own: Tensor | None = None


def attend(
    query_BSND: Tensor, prefix: tuple[Tensor, Tensor], span: Span, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Softmax over the seen step-0 keys [B, M, T, D] and the anchor's own keys, [B, A x some, M, D] each; returns [B,
    S, N, D].

    The step-0 keys come head by head, as products want them, since every step reads them.
    """
    assert span.own is not None or query_BSND.shape[1] == span.start.shape[1], (query_BSND.shape, span.start.shape)
    keys, values = zip(*own, strict=True)
    return _Attend.apply(query_BSND, *prefix, span, *keys, *values)  # type: ignore[no-any-return]


def attend_rows(query_BTND: Tensor, key_BTMD: Tensor, value_BTMD: Tensor, span: Span) -> Tensor:
    """Softmax of every slot over the slots it sees, none of them after it; returns [B, T, N, D]."""
    return _AttendRows.apply(query_BTND, key_BTMD, value_BTMD, span)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, span: Span, *own: Tensor) -> Tensor:
        own_k, own_v = (_together(half, span) for half in _halves(own))
        q = _rows(query, key.shape[1], span)
        far = torch.bmm(q, key.flatten(0, 1).mT)
        near, normaliser = _softmax(_split(q, key), _split(far, key), own_k, own_v, span)
        mixed = torch.bmm(far, value.flatten(0, 1)).add_(near.flatten(0, 1))
        output = _by_slot(mixed, query, span)
        ctx.save_for_backward(query, key, value, output, normaliser, *own)
        ctx.span = span
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, output, normaliser, *own = ctx.saved_tensors
        span, halves = ctx.span, _halves(own)
        own_k, own_v = (_together(half, span) for half in halves)
        q, grad, mixed = (
            _rows(query, key.shape[1], span),
            *(_rows(x, key.shape[1], span, scaled=False) for x in (grads[0], output)),
        )
        k, v = key.flatten(0, 1), value.flatten(0, 1)
        far, far_grad = torch.bmm(q, k.mT), torch.bmm(grad, v.mT)
        rows = _split(q, key), _split(grad, key), _split(mixed, key)
        near_q, *near = _softmax_gradient(
            rows, _split(far, key), _split(far_grad, key), own_k, own_v, normaliser, span
        )
        to_q = torch.bmm(far_grad, k).add_(near_q.flatten(0, 1)).mul_(query.shape[-1] ** -0.5)
        to_k, to_v = (_split(torch.bmm(x.mT, y), key) for x, y in ((far_grad, q), (far, grad)))
        parts = [piece for each, half in zip(near, halves, strict=True) for piece in _apart(each, half)]
        return _by_slot(to_q, query, span), to_k, to_v, None, *parts


class _AttendRows(torch.autograd.Function):
    """`_Attend` without own keys, in blocks of slots."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        k, v, nothing = _by_head(key), _by_head(value), key.new_empty(len(key), query.shape[1], 0, *key.shape[2:])
        outputs, normalisers = [], []
        for part, seen in _blocks(span):
            q, none, end = _rows(query[:, part], key.shape[2], seen), nothing[:, part], part.stop
            far = torch.bmm(q, k[:, :end].mT)
            normalisers.append(_softmax(_split(q, key), _split(far, key), none, none, seen)[1])
            outputs.append(_by_slot(torch.bmm(far, v[:, :end]), query[:, part], seen))
        output = torch.cat(outputs, dim=1)
        ctx.save_for_backward(query, key, value, output, *normalisers)
        ctx.span = span
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, output, *normalisers = ctx.saved_tensors
        k, v, nothing = _by_head(key), _by_head(value), key.new_empty(len(key), query.shape[1], 0, *key.shape[2:])
        to_k, to_v = (torch.zeros(k.shape, dtype=_exact(k[:0]).dtype, device=k.device) for _ in range(2))
        to_q = []
        for (part, seen), normaliser in zip(_blocks(ctx.span), normalisers, strict=True):
            q, none, end = _rows(query[:, part], key.shape[2], seen), nothing[:, part], part.stop
            grad, mixed = (_rows(x[:, part], key.shape[2], seen, scaled=False) for x in (grads[0], output))
            far, far_grad = torch.bmm(q, k[:, :end].mT), torch.bmm(grad, v[:, :end].mT)
            rows = _split(q, key), _split(grad, key), _split(mixed, key)
            _softmax_gradient(rows, _split(far, key), _split(far_grad, key), none, none, normaliser, seen)
            to_q.append(_by_slot(torch.bmm(far_grad, k[:, :end]).mul_(query.shape[-1] ** -0.5), query[:, part], seen))
            to_k[:, :end] += torch.bmm(far_grad.mT, q)
            to_v[:, :end] += torch.bmm(far.mT, grad)
        return torch.cat(to_q, dim=1), *(_split(x.to(key.dtype), key).transpose(1, 2) for x in (to_k, to_v)), None


def _blocks(span: Span) -> list[tuple[slice, Span]]:
    length = span.start.shape[1]
    parts = [slice(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]
    return [(part, Span(span.start[:, part].contiguous(), span.stop[:, part].contiguous())) for part in parts]


def _by_head(key_BTMD: Tensor) -> Tensor:
    """[B M, T, D]"""
    return key_BTMD.transpose(1, 2).flatten(0, 1)


def _rows(query_BSND: Tensor, groups: int, span: Span, scaled: bool = True) -> Tensor:
    """[B M, R, D], times D^-1/2 if it is `scaled`; M groups."""
    (batch, anchors), dim = span.start.shape, query_BSND.shape[-1]
    split = query_BSND.reshape(batch, anchors, -1, groups, query_BSND.shape[2] // groups, dim).permute(
        0, 3, 4, 1, 2, 5
    )
    return (split * dim**-0.5 if scaled else split).reshape(batch * groups, -1, dim)


def _by_slot(rows: Tensor, query_BSND: Tensor, span: Span) -> Tensor:
    """[B M, R, D] back to [B, S, N, D], without the scale."""
    batch, slots, heads, dim = query_BSND.shape
    anchors, groups = span.start.shape[1], len(rows) // batch
    split = rows.view(batch, groups, heads // groups, anchors, slots // anchors, dim)
    return split.permute(0, 3, 4, 1, 2, 5).reshape(query_BSND.shape)


def _split(rows: Tensor, key: Tensor) -> Tensor:
    """[B M, R, X] as [B, M, R, X]."""
    return rows.unflatten(0, (len(key), -1))


def _halves(own: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Keys and values."""
    return own[: len(own) // 2], own[len(own) // 2 :]


def _together(parts: Sequence[Tensor], span: Span) -> Tensor:
    """Own keys or values [B, A x some, M, D] as one [B, A, I, M, D]."""
    batch, anchors = span.start.shape
    return torch.cat([part.view(batch, anchors, -1, *part.shape[2:]) for part in parts], dim=2)


def _apart(own_BAIMD: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    sizes = [part.shape[1] // own_BAIMD.shape[1] for part in parts]
    return [
        piece.to(part.dtype).flatten(1, 2) for piece, part in zip(own_BAIMD.split(sizes, dim=2), parts, strict=True)
    ]


def _exact(x: Tensor) -> Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def _softmax(q: Tensor, far: Tensor, own_k: Tensor, own_v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Scores `far` [B, M, R, T] become weights, in place. Returns the own keys' part of the output [B, M, R, D], and
    log sums [B, M, R].
    """
    if cpu_attention.available(q):
        return cpu_attention.softmax(q, far, own_k, own_v, span.start, span.stop, span.own)
    return softmax_by_torch(q, far, own_k, own_v, span)


def _softmax_gradient(
    rows: tuple[Tensor, Tensor, Tensor],
    far: Tensor,
    far_grad: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    normaliser: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place, scores `far` become weights, and `far_grad`, the gradients of weights, gradients of scores.

    `rows` are q, the output's gradient and the output. Returns the own keys' part of q's gradient
    [B, M, R, D], and the gradients of own keys and values [B, A, I, M, D].
    """
    if cpu_attention.available(far):
        return cpu_attention.softmax_gradient(
            *rows, far, far_grad, own_k, own_v, normaliser, span.start, span.stop, span.own
        )
    return gradient_by_torch(rows, far, far_grad, own_k, own_v, normaliser, span)


def softmax_by_torch(q: Tensor, far: Tensor, own_k: Tensor, own_v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Plain twin of `cpu_attention.softmax`."""
    far_scores, near_scores = _scores(q, far, own_k, span)
    normaliser = torch.logaddexp(far_scores.logsumexp(-1), near_scores.logsumexp(-1))
    far.copy_((far_scores - normaliser[..., None]).exp())
    weights = (near_scores - normaliser[..., None]).exp().to(q.dtype)
    return torch.einsum("bmgaqi,baimd->bmgaqd", _wide(weights, span), own_v).flatten(2, 4), normaliser


def gradient_by_torch(
    rows: tuple[Tensor, Tensor, Tensor],
    far: Tensor,
    far_grad: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    normaliser: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain twin of `cpu_attention.softmax_gradient`."""
    q, grad, output = rows
    far_scores, near_scores = _scores(q, far, own_k, span)
    far.copy_((far_scores - normaliser[..., None]).exp())
    near = (near_scores - normaliser[..., None]).exp()
    dots = (_exact(grad) * _exact(output)).sum(-1, keepdim=True)
    far_grad.copy_((_exact(far_grad) - dots).mul_(far))
    near_grad = (
        _exact(torch.einsum("bmgaqd,baimd->bmgaqi", _wide(grad, span), own_v))
        .flatten(2, 4)
        .sub(dots)
        .mul_(near)
        .to(q.dtype)
    )
    to_q = torch.einsum("bmgaqi,baimd->bmgaqd", _wide(near_grad, span), own_k).flatten(2, 4)
    to_k = torch.einsum("bmgaqi,bmgaqd->baimd", _wide(near_grad, span), _wide(q, span))
    to_v = torch.einsum("bmgaqi,bmgaqd->baimd", _wide(near.to(q.dtype), span), _wide(grad, span))
    return to_q, to_k, to_v


def _scores(q: Tensor, far: Tensor, own_k: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """fp32 scores [B, M, R, T] and [B, M, R, I], minus infinity where nothing is seen."""
    slots = torch.arange(far.shape[-1], device=far.device)
    seen = (slots >= span.start[..., None]) & (slots < span.stop[..., None])
    split = _wide(far, span)
    far_scores = _exact(split).masked_fill(~seen[:, None, None, :, None], -torch.inf)
    near = _exact(torch.einsum("bmgaqd,baimd->bmgaqi", _wide(q, span), own_k))
    if span.own is not None:
        near = near.masked_fill(~span.own[:, None, None], -torch.inf)
    return far_scores.flatten(2, 4), near.flatten(2, 4)


def _wide(rows_BMRX: Tensor, span: Span) -> Tensor:
    """[B, M, G, A, Q, X]."""
    anchors = span.start.shape[1]
    queries = span.own.shape[2] if span.own is not None else 1
    return rows_BMRX.unflatten(2, (-1, anchors, queries))
