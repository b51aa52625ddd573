"""Attention of the unroll that keeps no scores: the backward pass computes them again from the softmax's normaliser.

A step keeps queries, keys, values and output only, so that memory does not grow with row length times depth. The
products are torch's; what lies between them, a softmax over prefix and own keys and its gradient, is passed in: plain
torch (`reference`) or compiled for CPUs (`cpu`). Anchors in order, as the slots of a row are, go through in blocks: a
block leaves out the slots after it.

Shapes: B rows, T slots of a row, A anchors, Q queries of an anchor, S = A Q, N query heads, M key-value heads, G = N /
M, R = G A Q, D head dimension, I own keys of an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from train.ops.attention.reference import exact
from train.ops.attention.span import Span

BLOCK = 128  # anchors


class Softmax(Protocol):
    """The two functions between the products, as `reference` and `cpu` have them."""

    def softmax(
        self, q_BMRD: Tensor, far_BMRT: Tensor, own_k_BAIMD: Tensor, own_v_BAIMD: Tensor, span: Span, /
    ) -> tuple[Tensor, Tensor]: ...

    def softmax_gradient(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        far_BMRT: Tensor,
        far_grad_BMRT: Tensor,
        own_k_BAIMD: Tensor,
        own_v_BAIMD: Tensor,
        normaliser_BMR: Tensor,
        span: Span,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Attend(torch.autograd.Function):
    """Over a shared prefix and own keys (`op.attend`). `softmax` computes what lies between the products."""

    @staticmethod
    def forward(
        ctx: Any, softmax: Softmax, query: Tensor, key: Tensor, value: Tensor, span: Span, *own: Tensor
    ) -> Tensor:
        own_k, own_v = (_together(half, span) for half in _halves(own))
        q = _rows(query, key.shape[1], span)
        far = torch.bmm(q, key.flatten(0, 1).mT)
        near, normaliser = softmax.softmax(_split(q, key), _split(far, key), own_k, own_v, span)
        mixed = torch.bmm(far, value.flatten(0, 1)).add_(near.flatten(0, 1))
        output = _by_slot(mixed, query, span)
        ctx.save_for_backward(query, key, value, output, normaliser, *own)
        ctx.softmax, ctx.span = softmax, span
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
        near_q, *near = ctx.softmax.softmax_gradient(
            rows, _split(far, key), _split(far_grad, key), own_k, own_v, normaliser, span
        )
        to_q = torch.bmm(far_grad, k).add_(near_q.flatten(0, 1)).mul_(query.shape[-1] ** -0.5)
        to_k, to_v = (_split(torch.bmm(x.mT, y), key) for x, y in ((far_grad, q), (far, grad)))
        parts = [piece for each, half in zip(near, halves, strict=True) for piece in _apart(each, half)]
        return None, _by_slot(to_q, query, span), to_k, to_v, None, *parts


class AttendRows(torch.autograd.Function):
    """`Attend` without own keys, in blocks of slots."""

    @staticmethod
    def forward(ctx: Any, softmax: Softmax, query: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        k, v, nothing = _by_head(key), _by_head(value), key.new_empty(len(key), query.shape[1], 0, *key.shape[2:])
        outputs, normalisers = [], []
        for part, seen in _blocks(span):
            q, none, end = _rows(query[:, part], key.shape[2], seen), nothing[:, part], part.stop
            far = torch.bmm(q, k[:, :end].mT)
            normalisers.append(softmax.softmax(_split(q, key), _split(far, key), none, none, seen)[1])
            outputs.append(_by_slot(torch.bmm(far, v[:, :end]), query[:, part], seen))
        output = torch.cat(outputs, dim=1)
        ctx.save_for_backward(query, key, value, output, *normalisers)
        ctx.softmax, ctx.span = softmax, span
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, output, *normalisers = ctx.saved_tensors
        k, v, nothing = _by_head(key), _by_head(value), key.new_empty(len(key), query.shape[1], 0, *key.shape[2:])
        to_k, to_v = (torch.zeros(k.shape, dtype=exact(k[:0]).dtype, device=k.device) for _ in range(2))
        to_q = []
        for (part, seen), normaliser in zip(_blocks(ctx.span), normalisers, strict=True):
            q, none, end = _rows(query[:, part], key.shape[2], seen), nothing[:, part], part.stop
            grad, mixed = (_rows(x[:, part], key.shape[2], seen, scaled=False) for x in (grads[0], output))
            far, far_grad = torch.bmm(q, k[:, :end].mT), torch.bmm(grad, v[:, :end].mT)
            rows = _split(q, key), _split(grad, key), _split(mixed, key)
            ctx.softmax.softmax_gradient(rows, _split(far, key), _split(far_grad, key), none, none, normaliser, seen)
            to_q.append(_by_slot(torch.bmm(far_grad, k[:, :end]).mul_(query.shape[-1] ** -0.5), query[:, part], seen))
            to_k[:, :end] += torch.bmm(far_grad.mT, q)
            to_v[:, :end] += torch.bmm(far.mT, grad)
        to_keys = (_split(x.to(key.dtype), key).transpose(1, 2) for x in (to_k, to_v))
        return None, torch.cat(to_q, dim=1), *to_keys, None


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
