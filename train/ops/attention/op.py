"""Attention of the unroll: over a shared prefix and an anchor's own keys, and over packed rows.

The one place that chooses: on a CPU the softmax is compiled (`cpu`), elsewhere it is torch's (`reference`); both under
products that keep no scores for the backward pass (`recompute`). Whole rows go to torch's own attention where the
compiled softmax does not take them.

Shapes: B rows, T slots of a row, A anchors, Q queries of an anchor, S = A Q, N query heads, M key-value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from train.ops.attention import cpu, reference
from train.ops.attention.recompute import Attend, AttendRows
from train.ops.attention.span import Span


def attend(
    query_BSND: Tensor, prefix: tuple[Tensor, Tensor], span: Span, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Softmax over the seen step-0 keys [B, M, T, D] and the anchor's own keys, [B, A x some, M, D] each; returns [B,
    S, N, D].

    The step-0 keys come head by head, as products want them, since every step reads them.
    """
    assert span.own is not None or query_BSND.shape[1] == span.start.shape[1], (query_BSND.shape, span.start.shape)
    keys, values = zip(*own, strict=True)
    softmax = cpu if cpu.available(query_BSND) else reference
    return Attend.apply(softmax, query_BSND, *prefix, span, *keys, *values)  # type: ignore[no-any-return]


def attend_rows(query_BTND: Tensor, key_BTMD: Tensor, value_BTMD: Tensor, span: Span) -> Tensor:
    """Softmax of every slot over the slots it sees, none of them after it; returns [B, T, N, D].

    torch's own attention forms every score of a masked row, which takes a CPU twice as long as the blocks here.
    """
    if cpu.available(query_BTND):
        return AttendRows.apply(cpu, query_BTND, key_BTMD, value_BTMD, span)  # type: ignore[no-any-return]
    seen_BTT = reference.seen_slots(span, key_BTMD.shape[1])
    query, key, value = (x.transpose(1, 2) for x in (query_BTND, key_BTMD, value_BTMD))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen_BTT[:, None], enable_gqa=True)
    return mixed.transpose(1, 2)
