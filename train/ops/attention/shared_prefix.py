"""Attention over a shared prefix: many drafting states, each with a few keys of its own behind those of the packed row
that it shares with others.

Shapes: B rows, T positions, R states, N query heads, M key-value heads, G = N / M, D head dimension, I own keys of a
state, L lines of the grid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """R states as cells [B, A] of a grid: those of one row stand in one line, so that they meet its keys in one
    product.
    """

    row_R: Tensor
    cell_R: Tensor
    shape: tuple[int, int]


def grid_of(row_R: Tensor, num_rows: int) -> Grid:
    """Rows 2 0 2: cells (2, 0), (0, 0), (2, 1), two to a line."""
    counts = torch.bincount(row_R, minlength=num_rows)
    order = row_R.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    cell = torch.empty_like(row_R)
    cell[order] = torch.arange(len(row_R), device=row_R.device) - starts[row_R[order]]
    return Grid(row_R, cell, (num_rows, int(counts.max())))


def attend_shared_prefix(
    query_RND: Tensor,
    prefix_keys_BMDT: Tensor,
    prefix_values_BMTD: Tensor,
    visible_RT: Tensor,
    own_keys_RIMD: Tensor,
    own_values_RIMD: Tensor,
    seen_RI: Tensor,
    grid: Grid,
) -> Tensor:
    """One softmax over the visible keys of the state's row and its own; [R, N, D]."""
    count, heads, dim = query_RND.shape
    groups, length = prefix_keys_BMDT.shape[1], prefix_keys_BMDT.shape[3]
    query = query_RND.view(count, groups, -1, dim) * dim**-0.5
    lines, cells = grid.shape
    at = (grid.row_R, slice(None), slice(None), grid.cell_R)

    def in_grid(x_RMGX: Tensor) -> Tensor:
        laid_out = x_RMGX.new_zeros(lines, groups, x_RMGX.shape[2], cells, x_RMGX.shape[3])
        laid_out[at] = x_RMGX
        return laid_out.flatten(2, 3)

    def out_of_grid(x_BMLX: Tensor) -> Tensor:
        return x_BMLX.unflatten(2, (-1, cells))[at]

    to_prefix = out_of_grid(in_grid(query) @ prefix_keys_BMDT)
    to_own = torch.einsum("rmgd,rimd->rmgi", query, own_keys_RIMD)
    hidden = ~torch.cat((visible_RT, seen_RI), dim=-1)[:, None, None]
    scores = torch.cat((to_prefix, to_own), dim=-1).float().masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1).to(prefix_values_BMTD.dtype)
    mixed = out_of_grid(in_grid(weights[..., :length]) @ prefix_values_BMTD)
    mixed = mixed + torch.einsum("rmgi,rimd->rmgd", weights[..., length:], own_values_RIMD)
    return mixed.reshape(count, heads, dim)
