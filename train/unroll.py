"""The self-conditioned unroll of `training.md` §2, by the diagonal trick: step 0 over whole rows, deeper steps at anchors.

Step d at anchor p reads the embedding of token p+1+d and the output of step d-1, sits at rotary position p+d, and sees the step-0 keys
of slots <= p of its document and its own keys of steps 1..d. Each decoder layer keeps its own step-0 keys and diagonals.

Shapes: B rows, T positions, A anchors of a row, H hidden, N query heads, M key-value heads, G = N / M, D head dimension, I diagonals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter


class Rows(NamedTuple):
    """Packed rows, int64 [B, T]. Document 0 is padding; positions restart at 0 in each document."""

    token_ids: Tensor
    positions: Tensor
    document_ids: Tensor


class Keys(NamedTuple):
    """One layer's keys (rotated) and values, [B, S, M, D]."""

    key: Tensor
    value: Tensor


StepKeys = tuple[Keys, ...]  # one entry for each decoder layer


def unroll(
    drafter: Eagle3Drafter,
    rows: Rows,
    features_BTH: Tensor,
    anchors_BA: Tensor,
    depth: int,
    window: int | None = None,
    recompute: bool = False,
) -> Iterator[Tensor]:
    """Yield the pre-norm outputs of steps 0..depth: [B, T, H] at every slot for step 0, then [B, A, H] at the anchors.

    `features` are the fused target features, [B, T, H]. With a refresh window w, step d sees the step-0 keys of slots
    <= p + max(0, d - w) and its own keys of the last w steps only; None is an infinite window, the plain unroll.
    `recompute` trades time for memory: each step's activations are computed again in the backward pass.
    Outputs of steps that would leave the row are meaningless; `losses.supervised` leaves them out.
    """
    length = rows.token_ids.shape[1]

    def embeds(slots: Tensor) -> Tensor:
        ahead = (slots + EMBED_AHEAD).clamp(max=length - 1)
        return drafter.embed(rows.token_ids.gather(1, ahead))

    def run(*args: object) -> tuple[Tensor, StepKeys]:
        return checkpoint(_step, *args, use_reentrant=False) if recompute else _step(*args)  # type: ignore[return-value, arg-type]

    every_slot = torch.arange(length, device=anchors_BA.device).expand(rows.token_ids.shape)
    causal = _visible(rows.document_ids, every_slot, every_slot)
    hidden, prefix = run(drafter, embeds(every_slot), features_BTH, rows.positions, causal, (), ())
    yield hidden
    if depth == 0:
        return
    hidden = hidden.gather(1, anchors_BA[..., None].expand(-1, -1, hidden.shape[-1]))
    first_positions = rows.positions.gather(1, anchors_BA)
    own: tuple[StepKeys, ...] = ()
    for d in range(1, depth + 1):
        reach = 0 if window is None else max(0, d - window)
        visible = _visible(rows.document_ids, anchors_BA, anchors_BA + reach)
        recent = own if window is None else own[len(own) - min(len(own), window - 1) :]
        hidden, keys = run(drafter, embeds(anchors_BA + d), hidden, first_positions + d, visible, prefix, recent)
        own = (*own, keys)
        yield hidden


def _visible(document_ids_BT: Tensor, anchors_BA: Tensor, last_BA: Tensor) -> Tensor:
    """bool [B, A, T]: step-0 slots up to `last` in the anchor's document."""
    length = document_ids_BT.shape[1]
    slots_T = torch.arange(length, device=document_ids_BT.device)
    same = document_ids_BT.gather(1, anchors_BA)[..., None] == document_ids_BT[:, None, :]
    return same & (slots_T <= last_BA[..., None])


def _step(
    drafter: Eagle3Drafter,
    embeds_BSH: Tensor,
    features_BSH: Tensor,
    positions_BS: Tensor,
    visible_BST: Tensor,
    prefix: StepKeys,
    own: tuple[StepKeys, ...],
) -> tuple[Tensor, StepKeys]:
    """One drafter step. Without `prefix` it is step 0 and sees its own keys under `visible`. Returns the step's keys, layer by layer."""
    made: list[Keys] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made.append(Keys(key, value))
        if not prefix:
            return _attend_rows(query, key, value, visible_BST)
        diagonals = [step[layer] for step in own] + [made[layer]]
        return attend_diagonals(query, prefix[layer], visible_BST, diagonals)

    hidden = drafter(embeds_BSH, features_BSH, positions_BS, attend)
    return hidden, tuple(made)


def _attend_rows(query_BTND: Tensor, key_BTMD: Tensor, value_BTMD: Tensor, visible_BTT: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query_BTND, key_BTMD, value_BTMD))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible_BTT[:, None], enable_gqa=True).transpose(1, 2)


def attend_diagonals(query_BAND: Tensor, prefix: Keys, visible_BAT: Tensor, diagonals: list[Keys]) -> Tensor:
    """Softmax over the visible step-0 keys [B, T, M, D] and the anchor's own keys, one [B, A, M, D] for each earlier step and this one.

    Returns [B, A, N, D]. Each anchor meets only its own diagonals, so those scores are I numbers a query instead of a matrix.
    """
    batch, anchors, heads, dim = query_BAND.shape
    groups = prefix.key.shape[2]
    query = query_BAND.view(batch, anchors, groups, -1, dim).permute(0, 2, 3, 1, 4) * dim**-0.5  # [B, M, G, A, D]
    own_key, own_value = (torch.stack(parts, dim=3).transpose(1, 2) for parts in zip(*diagonals, strict=True))  # [B, M, A, I, D]
    far = query.flatten(2, 3) @ prefix.key.permute(0, 2, 3, 1)  # [B, M, G A, T]
    far = far.float().unflatten(2, (-1, anchors)).masked_fill(~visible_BAT[:, None, None], -torch.inf)
    near = torch.einsum("bmgad,bmaid->bmgai", query, own_key).float()
    weights = torch.cat((far, near), dim=-1).softmax(-1).to(prefix.value.dtype)
    length = visible_BAT.shape[-1]
    mixed = (weights[..., :length].flatten(2, 3) @ prefix.value.permute(0, 2, 1, 3)).unflatten(2, (-1, anchors))
    mixed = mixed + torch.einsum("bmgai,bmaid->bmgad", weights[..., length:], own_value)
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, anchors, heads, dim)
