"""The self-conditioned unroll (EAGLE-3's training-time test) and the glue replay: step 0 over whole rows, the rest at
anchors (train/README.md, section 2).

Step d at anchor p reads the embedding of token p+1+d and the output of step d-1, sits at rotary position p+d, and sees
the step-0 keys of slots <= p of its document and its own keys of steps 1..d. Each decoder layer keeps its own step-0
keys and diagonals.

Shapes: B rows, T positions, A anchors of a row, Q queries of an anchor, S = A Q, H hidden, N query heads, M key-value
heads, G = N / M, D head dimension, I own keys of an anchor, K tokens of a speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.eagle3_ssd.align import EMBED_AHEAD
from drafters.eagle3_ssd.model import Eagle3Drafter
from train.ops.attention.op import attend, attend_rows
from train.ops.attention.span import Span


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


class FirstStep(NamedTuple):
    """Step 0 at every slot: outputs [B, T, H], and the keys that everything later sees."""

    hidden: Tensor
    keys: StepKeys


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
    Outputs of steps that would leave the row are meaningless; `supervision.supervised` leaves them out.
    """
    first = first_step(drafter, rows, features_BTH, recompute)
    yield first.hidden
    yield from deeper_steps(drafter, rows, first, anchors_BA, depth, window, recompute)


def first_step(drafter: Eagle3Drafter, rows: Rows, features_BTH: Tensor, recompute: bool = False) -> FirstStep:
    """Step 0, with true features, at every slot."""
    every_slot = torch.arange(rows.token_ids.shape[1], device=features_BTH.device).expand(rows.token_ids.shape)
    span = _seen(rows.document_ids, every_slot, every_slot)
    return FirstStep(
        *_runner(recompute)(drafter, _embed(drafter, rows, every_slot), features_BTH, rows.positions, span, (), ())
    )


def deeper_steps(
    drafter: Eagle3Drafter,
    rows: Rows,
    first: FirstStep,
    anchors_BA: Tensor,
    depth: int,
    window: int | None = None,
    recompute: bool = False,
) -> Iterator[Tensor]:
    """Yield the outputs [B, A, H] of steps 1..depth (`unroll`)."""
    run, prefix = _runner(recompute), _by_head(first.keys)
    hidden = _at(first.hidden, anchors_BA)
    first_positions = rows.positions.gather(1, anchors_BA)
    own: tuple[StepKeys, ...] = ()
    for d in range(1, depth + 1):
        reach = 0 if window is None else max(0, d - window)
        span = _seen(rows.document_ids, anchors_BA, anchors_BA + reach)
        recent = own if window is None else own[len(own) - min(len(own), window - 1) :]
        hidden, keys = run(
            drafter, _embed(drafter, rows, anchors_BA + d), hidden, first_positions + d, span, prefix, recent
        )
        own = (*own, keys)
        yield hidden


class Replay(NamedTuple):
    """Outputs of a replayed round: of slots p..p+K, [B, A, K+1, H], and of the K steps of one branch, [B, A, K, H]."""

    glue: Tensor
    branch: Tensor


def glue_replay(
    drafter: Eagle3Drafter,
    rows: Rows,
    first: FirstStep,
    anchors_BA: Tensor,
    stale_BAKH: Tensor,
    forks_BA: Tensor,
    refresh: int = 0,
    recompute: bool = False,
) -> Replay:
    """A round of serving whose newest slot with a true feature is the anchor p: the glue pass, and a branch from fork
    k in 0..K.

    Glue slot p+j, j = 1..K, has the feature `stale[j-1]` that an earlier round computed, and sees the step-0 keys <= p
    and glue slots 1..j. Branch step m = 1..K stands for slot p+k+m, starts from the output of slot p+k, and sees the
    step-0 keys <= p, glue slots 1..k and its own steps. Each refresh repeats the glue pass, fed with what the slots
    before gave in the pass before. Upper layers' keys are those of the last glue pass, as in serving
    (infer/draft/README.md, section 3).

    The features of the next round, after a hit at k, are `branch` at anchor p+k+1: several hits in a row are replayed
    one by one.
    """
    batch, anchors, lookahead, _ = stale_BAKH.shape
    run, prefix, device = _runner(recompute), _by_head(first.keys), anchors_BA.device
    first_positions = rows.positions.gather(1, anchors_BA)
    span = _seen(rows.document_ids, anchors_BA, anchors_BA)
    ahead = torch.arange(1, lookahead + 1, device=device)
    causal = torch.ones(lookahead, lookahead, dtype=torch.bool, device=device).tril()[None, None]
    slots, positions = ((start[..., None] + ahead).flatten(1) for start in (anchors_BA, first_positions))
    embeds, newest, features = _embed(drafter, rows, slots), _at(first.hidden, anchors_BA)[:, :, None], stale_BAKH
    outputs, glue_keys = newest, ()
    for _ in range(refresh + 1):
        glue, glue_keys = run(
            drafter, embeds, features.flatten(1, 2), positions, span._replace(own=causal), prefix, ()
        )
        outputs = torch.cat((newest, glue.view(batch, anchors, lookahead, -1)), dim=2)
        features = outputs[:, :, :-1]
    hidden = outputs.gather(2, forks_BA[..., None, None].expand(-1, -1, 1, outputs.shape[-1]))[:, :, 0]
    own: tuple[StepKeys, ...] = (glue_keys,)
    seen = (ahead <= forks_BA[..., None])[:, :, None]
    branch = []
    for m in range(1, lookahead + 1):
        with_own = span._replace(own=F.pad(seen, (0, m), value=True))
        place = forks_BA + m
        hidden, keys = run(
            drafter, _embed(drafter, rows, anchors_BA + place), hidden, first_positions + place, with_own, prefix, own
        )
        own = (*own, keys)
        branch.append(hidden)
    return Replay(outputs, torch.stack(branch, dim=2))


@torch.no_grad()
def stale_features(
    drafter: Eagle3Drafter, rows: Rows, first: FirstStep, origins_BA: Tensor, shifts_BA: Tensor, lookahead: int
) -> Tensor:
    """What serving feeds glue slots 1..K at anchor origin + shift: outputs of steps shift .. shift+K-1 at the origin,
    [B, A, K, H].

    Exact up to one hit after a miss (shift <= K+1); after more, serving saw newer keys on the way. Without a gradient:
    the rounds before are over, as they are in serving, and the unroll's own losses train what they gave.
    """
    deepest = int(shifts_BA.max()) + lookahead - 1
    steps = [_at(first.hidden, origins_BA), *deeper_steps(drafter, rows, first, origins_BA, deepest)]
    index = shifts_BA[..., None] + torch.arange(lookahead, device=shifts_BA.device)
    return torch.stack(steps, dim=2).gather(2, index[..., None].expand(-1, -1, -1, steps[0].shape[-1]))


def _seen(document_ids_BT: Tensor, anchors_BA: Tensor, last_BA: Tensor) -> Span:
    """Step-0 slots up to `last` in the anchor's document. A document's slots lie side by side."""
    length = document_ids_BT.shape[1]
    slots_T = torch.arange(length, device=document_ids_BT.device)
    same = document_ids_BT.gather(1, anchors_BA)[..., None] == document_ids_BT[:, None, :]
    start = same.to(torch.uint8).argmax(-1)
    return Span(start, start + (same & (slots_T <= last_BA[..., None])).sum(-1))


def _embed(drafter: Eagle3Drafter, rows: Rows, slots_BS: Tensor) -> Tensor:
    ahead = (slots_BS + EMBED_AHEAD).clamp(max=rows.token_ids.shape[1] - 1)
    return drafter.embed(rows.token_ids.gather(1, ahead))


def _at(hidden_BTH: Tensor, slots_BA: Tensor) -> Tensor:
    return hidden_BTH.gather(1, slots_BA[..., None].expand(-1, -1, hidden_BTH.shape[-1]))


def _by_head(keys: StepKeys) -> StepKeys:
    """Step-0 keys as [B, M, T, D], which every later step reads."""
    return tuple(Keys(*(x.transpose(1, 2).contiguous() for x in layer)) for layer in keys)


def _runner(recompute: bool) -> Callable[..., tuple[Tensor, StepKeys]]:
    """`_step`, computed again in the backward pass where wanted. It must not see a list that grows later: keys go in
    as tuples.
    """

    def run(*args: object) -> tuple[Tensor, StepKeys]:
        return checkpoint(_step, *args, use_reentrant=False)  # type: ignore[return-value]

    return run if recompute else _step


def _step(
    drafter: Eagle3Drafter,
    embeds_BSH: Tensor,
    features_BSH: Tensor,
    positions_BS: Tensor,
    span: Span,
    prefix: StepKeys,
    own: tuple[StepKeys, ...],
) -> tuple[Tensor, StepKeys]:
    """One drafter step, and its keys, layer by layer. Without `prefix`, which comes by head, it is step 0 and sees its
    own keys.
    """
    made: list[Keys] = []

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made.append(Keys(key, value))
        if not prefix:
            return attend_rows(query, key, value, span)
        return attend(query, prefix[layer], span, [*(step[layer] for step in own), made[layer]])

    hidden = drafter(embeds_BSH, features_BSH, positions_BS, attention)
    return hidden, tuple(made)
