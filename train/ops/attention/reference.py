"""Attention of the unroll in plain torch: the whole operation with autograd's gradients, and the softmax between its
products with the gradient written out.

`attend` and `attend_rows` are the truth that `op` is tested against; `softmax` and `softmax_gradient` are what `cpu`
is tested against, and what runs on other devices.

Shapes: B rows, T slots of a row, A anchors, Q queries of an anchor, S = A Q, N query heads, M key-value heads, G = N /
M, R = G A Q, D head dimension, I own keys of an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from train.ops.attention.span import Span


def attend(
    query_BSND: Tensor, prefix: tuple[Tensor, Tensor], span: Span, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """See `op.attend`: one masked softmax over step-0 keys and own keys."""
    batch, anchors = span.start.shape
    own_k, own_v = (torch.cat([x.unflatten(1, (anchors, -1)) for x in side], dim=2) for side in zip(*own, strict=True))
    key, value = prefix
    groups, slots = query_BSND.shape[2] // key.shape[1], key.shape[2]
    query = query_BSND.unflatten(1, (anchors, -1)).unflatten(3, (-1, groups)) * query_BSND.shape[-1] ** -0.5
    far = torch.einsum("baqmgd,bmtd->baqmgt", query, key)
    near = torch.einsum("baqmgd,baimd->baqmgi", query, own_k)
    far = far.masked_fill(~seen_slots(span, slots)[:, :, None, None, None], -torch.inf)
    if span.own is not None:
        near = near.masked_fill(~span.own[:, :, :, None, None], -torch.inf)
    weights = exact(torch.cat((far, near), dim=-1)).softmax(-1).to(query.dtype)
    mixed = torch.einsum("baqmgt,bmtd->baqmgd", weights[..., :slots], value)
    mixed = mixed + torch.einsum("baqmgi,baimd->baqmgd", weights[..., slots:], own_v)
    return mixed.reshape(batch, -1, *query_BSND.shape[2:])


def attend_rows(query_BTND: Tensor, key_BTMD: Tensor, value_BTMD: Tensor, span: Span) -> Tensor:
    """See `op.attend_rows`."""
    query = query_BTND.unflatten(2, (key_BTMD.shape[2], -1)) * query_BTND.shape[-1] ** -0.5
    scores = torch.einsum("bsmgd,btmd->bsmgt", query, key_BTMD)
    scores = exact(scores).masked_fill(~seen_slots(span, key_BTMD.shape[1])[:, :, None, None], -torch.inf)
    return torch.einsum("bsmgt,btmd->bsmgd", scores.softmax(-1).to(query.dtype), value_BTMD).flatten(2, 3)


def seen_slots(span: Span, slots: int) -> Tensor:
    """bool [B, A, T]: which step-0 slots each anchor sees."""
    slots_T = torch.arange(slots, device=span.start.device)
    return (slots_T >= span.start[..., None]) & (slots_T < span.stop[..., None])


def exact(x: Tensor) -> Tensor:
    """At least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def softmax(q: Tensor, far: Tensor, own_k: Tensor, own_v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Scores `far` [B, M, R, T] become weights, in place. Returns the own keys' part of the output [B, M, R, D], and
    the logarithms of the sums [B, M, R].
    """
    far_scores, near_scores = _scores(q, far, own_k, span)
    normaliser = torch.logaddexp(far_scores.logsumexp(-1), near_scores.logsumexp(-1))
    far.copy_((far_scores - normaliser[..., None]).exp())
    weights = (near_scores - normaliser[..., None]).exp().to(q.dtype)
    return torch.einsum("bmgaqi,baimd->bmgaqd", _wide(weights, span), own_v).flatten(2, 4), normaliser


def softmax_gradient(
    rows: tuple[Tensor, Tensor, Tensor],
    far: Tensor,
    far_grad: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    normaliser: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place, scores `far` become weights, and `far_grad`, the gradients of weights, gradients of scores.

    `rows` are q, the output's gradient and the output. Returns the own keys' part of q's gradient [B, M, R, D], and
    the gradients of own keys and values [B, A, I, M, D].
    """
    q, grad, output = rows
    far_scores, near_scores = _scores(q, far, own_k, span)
    far.copy_((far_scores - normaliser[..., None]).exp())
    near = (near_scores - normaliser[..., None]).exp()
    dots = (exact(grad) * exact(output)).sum(-1, keepdim=True)
    far_grad.copy_((exact(far_grad) - dots).mul_(far))
    near_grad = (
        exact(torch.einsum("bmgaqd,baimd->bmgaqi", _wide(grad, span), own_v))
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
    seen = seen_slots(span, far.shape[-1])
    split = _wide(far, span)
    far_scores = exact(split).masked_fill(~seen[:, None, None, :, None], -torch.inf)
    near = exact(torch.einsum("bmgaqd,baimd->bmgaqi", _wide(q, span), own_k))
    if span.own is not None:
        near = near.masked_fill(~span.own[:, None, None], -torch.inf)
    return far_scores.flatten(2, 4), near.flatten(2, 4)


def _wide(rows_BMRX: Tensor, span: Span) -> Tensor:
    """[B, M, G, A, Q, X]."""
    anchors = span.start.shape[1]
    queries = span.own.shape[2] if span.own is not None else 1
    return rows_BMRX.unflatten(2, (-1, anchors, queries))
