"""The head's losses on a GPU, in Triton: logits and their normaliser in one pass over vocabulary tiles, the gradient
in the logits' place.

The same statistics and the same gradient as `closed_form`. Two kernels. The first multiplies hidden rows with a tile
of the head and leaves, beside the logits, what a softmax and a cross-entropy need of the tile. The second takes one
row: it joins the tiles' numbers, reads the logits once for the sums that need the normaliser, and once more to write
the gradient over them.

n rows, H hidden, V draft vocabulary, P positions with a teacher; BR, BV, BH: rows, vocabulary and hidden of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.ops.head_loss.terms import LossOptions, PredictionStats, Teacher

BLOCK_ROWS, BLOCK_VOCAB, BLOCK_HIDDEN = 64, 128, 64
ROW_BLOCK = 2048  # of a row, read at a time by the second kernel
BYTES = 256 << 20  # of logits, at a time
TINY = tl.constexpr(1e-37)
NO_BONUS, GREEDY, SAMPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
HIGH, PLACE, TOTAL, MASS, PRODUCT = (tl.constexpr(i) for i in range(5))  # what the first kernel leaves of a tile
NUM_COLUMNS = len(PredictionStats._fields)
COLUMNS = tl.constexpr(NUM_COLUMNS)


def rows_at_once(vocab: int, bytes_each: int) -> int:
    """How many rows of logits to hold at a time."""
    return max(BLOCK_ROWS, BYTES // (vocab * bytes_each))


def chunk(
    hidden_nH: Tensor,
    head_VH: Tensor,
    teacher: Teacher,
    rows_n: Tensor,
    base_n: Tensor,
    bonus_n: Tensor | None,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Columns of `PredictionStats`, fp32 [n, C], and the gradient of the loss over the logits, [n, V] in the dtype of
    `hidden`.
    """
    probs, best, inside = teacher
    number, vocab = len(hidden_nH), len(head_VH)
    tiles = -(-vocab // BLOCK_VOCAB)
    logits = torch.empty(number, vocab, dtype=hidden_nH.dtype, device=hidden_nH.device)
    partial = torch.empty(5, number, tiles, dtype=torch.float32, device=hidden_nH.device)
    stats = torch.empty(number, NUM_COLUMNS, dtype=torch.float32, device=hidden_nH.device)
    if not number:
        return stats, logits
    blocks: dict[str, Any] = {"BR": BLOCK_ROWS, "BV": BLOCK_VOCAB, "BH": BLOCK_HIDDEN}
    inputs = (hidden_nH.contiguous(), head_VH.contiguous(), probs, rows_n)
    _logit_tiles[(triton.cdiv(number, BLOCK_ROWS), tiles)](
        *inputs, logits, partial, number, vocab, hidden_nH.shape[1], tiles, **blocks
    )
    cross_entropy, total_variation, temperature, fan_out = options
    kind = NO_BONUS if bonus_n is None else SAMPLED if temperature else GREEDY
    chosen = (
        rows_n,
        best[rows_n],
        inside[rows_n],
        base_n.float(),
        base_n.float() if bonus_n is None else bonus_n.float(),
    )
    sizes: dict[str, Any] = {
        "BLOCK": min(ROW_BLOCK, triton.next_power_of_2(vocab)),
        "TILES": triton.next_power_of_2(tiles),
        "BONUS": kind,
    }
    _row_losses[(number,)](
        logits, partial, probs, *chosen, stats, number, vocab, tiles, cross_entropy, total_variation, fan_out, **sizes
    )
    return stats, logits


@triton.jit
def _logit_tiles(
    x, w, probs, rows, logits, partial, n, V, H, tiles, BR: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr
):
    """Logits of BR rows and BV tokens; and for each row the highest, its place, sum exp(z - highest), sum p, sum p z
    of this tile.
    """
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    tile = tl.program_id(1)
    v = tile * BV + tl.arange(0, BV)
    here, known = r < n, v < V
    z = tl.zeros((BR, BV), dtype=tl.float32)
    for start in range(0, H, BH):
        h = start + tl.arange(0, BH)
        left = tl.load(x + r[:, None] * H + h[None, :], mask=here[:, None] & (h < H)[None, :], other=0.0)
        right = tl.load(
            w + v[None, :].to(tl.int64) * H + h[:, None], mask=known[None, :] & (h < H)[:, None], other=0.0
        )
        z = tl.dot(left, right, z, input_precision="ieee")
    both = here[:, None] & known[None, :]
    rounded = z.to(logits.dtype.element_ty)
    tl.store(logits + r[:, None] * V + v[None, :], rounded, mask=both)
    z = tl.where(known[None, :], rounded.to(tl.float32), -float("inf"))
    row = tl.load(rows + r, mask=here, other=0)
    p = tl.load(probs + row[:, None] * V + v[None, :], mask=both, other=0.0).to(tl.float32)
    high = tl.max(z, 1)
    to = partial + r * tiles + tile
    tl.store(to + HIGH * n * tiles, high, mask=here)
    place = tl.min(tl.where(z == high[:, None], v[None, :], V), 1)
    tl.store(to + PLACE * n * tiles, place.to(tl.float32), mask=here)
    tl.store(to + TOTAL * n * tiles, tl.sum(tl.exp(z - high[:, None]), 1), mask=here)
    tl.store(to + MASS * n * tiles, tl.sum(p, 1), mask=here)
    tl.store(to + PRODUCT * n * tiles, tl.sum(tl.where(p > 0, p * z, 0.0), 1), mask=here)


@triton.jit
def _row_losses(
    logits,
    partial,
    probs,
    rows,
    best,
    inside,
    bases,
    bonuses,
    stats,
    n,
    V,
    tiles,
    cross_entropy,
    total_variation,
    fan_out,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BONUS: tl.constexpr,
):
    """Statistics of one row, and its gradient over its logits. Formulas: `closed_form`."""
    i = tl.program_id(0).to(tl.int64)
    z_V, p_V = logits + i * V, probs + tl.load(rows + i) * V
    t, at = tl.load(best + i), tl.arange(0, TILES)
    has_target, base, bonus = tl.load(inside + i), tl.load(bases + i), tl.load(bonuses + i)
    of = partial + i * tiles + at
    there = at < tiles
    highs = tl.load(of + HIGH * n * tiles, mask=there, other=-float("inf"))
    high = tl.max(highs, 0)
    total = tl.sum(tl.load(of + TOTAL * n * tiles, mask=there, other=0.0) * tl.exp(highs - high), 0)
    mass = tl.sum(tl.load(of + MASS * n * tiles, mask=there, other=0.0), 0)
    product = tl.sum(tl.load(of + PRODUCT * n * tiles, mask=there, other=0.0), 0)
    top = tl.min(tl.where(highs == high, tl.load(of + PLACE * n * tiles, mask=there, other=0.0), V * 1.0), 0).to(
        tl.int32
    )
    log_normaliser = high + tl.log(total)
    z_t = tl.load(z_V + t).to(tl.float32)
    p_top, q_top = tl.load(p_V + top).to(tl.float32), tl.exp(high - log_normaliser)

    common, below, above, rest = 0.0, 0.0, 0.0, 0.0
    residual, drawn, residual_z, u_others, lost = 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        known = v < V
        z = tl.load(z_V + v, mask=known, other=-float("inf")).to(tl.float32)
        p = tl.load(p_V + v, mask=known, other=0.0).to(tl.float32)
        q = tl.exp(z - log_normaliser)
        common += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, 0.0), 0)
        above += tl.sum(tl.where(z > z_t, 1.0, 0.0), 0)
        rest += tl.sum(tl.where(v == top, 0.0, q), 0)
        if BONUS == SAMPLED:
            more = tl.maximum(p - q, 0.0)
            rejected = tl.where(v == top, 0.0, tl.maximum(q - p, 0.0))
            residual += tl.sum(more, 0)
            residual_z += tl.sum(tl.where(more > 0, more * z, 0.0), 0)
            drawn += tl.sum(rejected, 0)
            u_others += tl.sum(rejected / tl.maximum(1.0 - q, TINY), 0)
            lost += tl.sum(rejected * tl.log(tl.maximum(1.0 - q, TINY)), 0)
    rest = tl.maximum(rest, TINY)
    rank = tl.where(has_target, above, V * 1.0)
    of_p = base * cross_entropy
    of_below = base * total_variation
    of_q = of_p * mass + of_below * below
    value = 0.0
    counts = has_target & (rank > 0)
    if BONUS == GREEDY:
        value = tl.where(counts, tl.log(rest) + log_normaliser - z_t, 0.0)
    of_rest = tl.where(counts, bonus / rest, 0.0)
    rejected_top = tl.maximum(q_top - p_top, 0.0)
    u_top = rejected_top / rest
    norm = tl.maximum(residual + tl.maximum(1.0 - mass, 0.0), TINY)
    cacheable = residual / norm
    if BONUS == SAMPLED:
        drawn += rejected_top
        lost += rejected_top * tl.log(rest)
        value = drawn * (cacheable * log_normaliser - residual_z / norm) + cacheable * lost

    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        known = v < V
        z = tl.load(z_V + v, mask=known, other=-float("inf")).to(tl.float32)
        p = tl.load(p_V + v, mask=known, other=0.0).to(tl.float32)
        q = tl.exp(z - log_normaliser)
        grad = of_q * q - of_p * p - of_below * tl.where(q < p, q, 0.0)
        if BONUS == GREEDY:
            grad += tl.where(v == top, 0.0, q * of_rest) - tl.where((v == t) & counts, bonus, 0.0)
        if BONUS == SAMPLED:
            u = tl.maximum(q - p, 0.0) / tl.maximum(1.0 - q, TINY)
            grad += bonus * (
                cacheable * q * (u_others + tl.where(v == top, 0.0, u_top - u)) - drawn * tl.maximum(p - q, 0.0) / norm
            )
        tl.store(z_V + v, grad.to(logits.dtype.element_ty), mask=known)

    to = stats + i * COLUMNS
    tl.store(to, mass * log_normaliser - product)
    tl.store(to + 1, 1.0 - common)
    tl.store(to + 2, tl.where(rank == 0, 1.0, 0.0))
    tl.store(to + 3, tl.where(rank < fan_out, 1.0, 0.0))
    tl.store(to + 4, tl.where((rank >= 1) & (rank <= fan_out), 1.0, 0.0))
    tl.store(to + 5, tl.maximum(1.0 - mass, 0.0))
    tl.store(to + 6, value)
