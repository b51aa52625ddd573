"""Paged attention against a plain softmax: blocks in any order, requests of any length, any mask, and the one-call
path.

R query rows of all requests, L keys of one request, N query heads, M key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infer.kernels.attention import reference
from infer.kernels.attention.context import DocumentContext, attend_in_context
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import PagedContext, PagedRequest
from infer.kernels.attention.sdpa import additive_mask, attend_rows, causal_mask

N, M, D, BLOCK = 6, 2, 8, 4
SCALE = D**-0.5
CPU = torch.device("cpu")


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums in fp32."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def plain_attention(query_QND: Tensor, keys_LMD: Tensor, values_LMD: Tensor, visible_QL: Tensor) -> Tensor:
    """Softmax row by row, head by head: query head n reads key head n // (N / M)."""
    out = torch.zeros_like(query_QND)
    groups = query_QND.shape[1] // keys_LMD.shape[1]
    for q in range(query_QND.shape[0]):
        seen = visible_QL[q]
        for n in range(query_QND.shape[1]):
            keys, values = keys_LMD[seen, n // groups], values_LMD[seen, n // groups]
            out[q, n] = torch.softmax(keys @ query_QND[q, n] * SCALE, 0) @ values
    return out


class Sequences:
    """Keys and values of some requests in a pool full of other numbers, and the rows that come next."""

    def __init__(
        self, blocks: list[tuple[int, ...]], lengths: list[tuple[int, int]], num_blocks: int, seed: int = 0
    ) -> None:
        """`lengths`: keys and new rows of each request."""
        self.random = torch.Generator().manual_seed(seed)
        self.pool = KvPool.allocate(1, num_blocks, BLOCK, (M, D), like=torch.zeros(()))
        for side in (self.pool.keys[0], self.pool.values[0]):
            side.copy_(100 * self._draw(*side.shape))  # what others left there: seen by nobody, and obvious if it is
        self.blocks, self.lengths = blocks, lengths
        self.keys, self.values = ([self._draw(keys, M, D) for keys, _ in lengths] for _ in range(2))
        self.queries = [self._draw(rows, N, D) for _, rows in lengths]
        for own, (keys, rows), k, v in zip(blocks, lengths, self.keys, self.values, strict=True):
            slots = self.pool.slots(own, 0, keys - rows)
            self.pool.keys[0][slots], self.pool.values[0][slots] = k[: keys - rows], v[: keys - rows]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def context(self, masks: Sequence[Tensor | None] = ()) -> PagedContext:
        own_masks = masks or [None] * len(self.blocks)
        requests = [
            PagedRequest(b, keys, rows, m)
            for b, (keys, rows), m in zip(self.blocks, self.lengths, own_masks, strict=True)
        ]
        return PagedContext.build(self.pool, requests, CPU)

    def attend(self, context: PagedContext) -> Tensor:
        """[R, N, D], by the context."""
        new = [
            [x[keys - rows :] for x, (keys, rows) in zip(side, self.lengths, strict=True)]
            for side in (self.keys, self.values)
        ]
        query, key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in (self.queries, *new))
        return context.attend(0, query, key, value, SCALE)[0]

    def by_reference(self, context: PagedContext) -> Tensor:
        """[R, N, D], by the reference; writes the new keys like the context."""
        key, value = (
            torch.cat([x[keys - rows :] for x, (keys, rows) in zip(side, self.lengths, strict=True)])
            for side in (self.keys, self.values)
        )
        return reference.attend(torch.cat(self.queries), key, value, self.pool, 0, context.requests, SCALE)

    def expected(self, masks: Sequence[Tensor | None] = ()) -> Tensor:
        """[R, N, D], by the plain twin."""
        pieces = []
        for i, (keys, rows) in enumerate(self.lengths):
            mask = masks[i] if masks else None
            visible = causal_mask(rows, keys, CPU) if mask is None else mask
            pieces.append(plain_attention(self.queries[i], self.keys[i], self.values[i], visible))
        return torch.cat(pieces)


def test_the_causal_mask_ends_at_the_diagonal() -> None:
    assert causal_mask(2, 4, CPU).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_the_bias_repeats_the_rows_for_each_head_of_a_group() -> None:
    inf = float("inf")
    assert (
        additive_mask(torch.tensor([[True, False], [True, True]]), 2, torch.float32).tolist()
        == [[0, -inf], [0, 0]] * 2
    )


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 9), (3, 3), (3, 9)])
def test_attend_rows_is_plain_attention(rows: int, keys: int) -> None:
    torch.manual_seed(0)
    query, k, v = torch.randn(rows, N, D), torch.randn(keys, M, D), torch.randn(keys, M, D)
    visible = torch.rand(rows, keys) < 0.6
    visible[:, 0] = True
    out = attend_rows(query, k, v, additive_mask(visible, N // M, torch.float32), SCALE)
    assert_same(out, plain_attention(query, k, v, visible))
    everything = torch.ones(rows, keys, dtype=torch.bool)
    assert_same(attend_rows(query, k, v, None, SCALE), plain_attention(query, k, v, everything))


@pytest.mark.parametrize("keys", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_around_a_block_boundary_in_any_order_of_blocks(keys: int, rows: int) -> None:
    outputs = []
    for blocks in ((3, 4, 5), (5, 0, 3), (4, 3, 6)):
        sequences = Sequences([blocks], [(keys, rows)], num_blocks=7)
        context = sequences.context()
        assert isinstance(context.reads[0], slice) == (blocks == (3, 4, 5) or keys <= BLOCK)
        outputs.append(sequences.attend(context))
        assert_same(outputs[-1], sequences.expected())
        slots = sequences.pool.slots(blocks, 0, keys)
        assert torch.equal(sequences.pool.keys[0][slots], sequences.keys[0])
        assert torch.equal(sequences.pool.values[0][slots], sequences.values[0])
    assert_same(torch.stack(outputs), outputs[0].expand(3, -1, -1, -1))


def test_requests_of_different_lengths_read_their_own_keys() -> None:
    sequences = Sequences([(0, 1, 2), (6, 3), (4, 5), (7,)], [(11, 4), (5, 1), (8, 8), (2, 1)], num_blocks=8)
    assert_same(sequences.attend(sequences.context()), sequences.expected())


def test_only_the_new_slots_are_written() -> None:
    sequences = Sequences([(0, 1), (4, 3)], [(6, 2), (5, 1)], num_blocks=6)
    before = sequences.pool.keys[0].clone()
    sequences.attend(sequences.context())
    changed = (sequences.pool.keys[0] != before).any(-1).any(-1).nonzero()[:, 0].tolist()
    assert changed == [4, 5, 3 * BLOCK]


def test_a_mask_decides_what_a_row_sees() -> None:
    """A tree: prefix of 3, then two branches of two nodes each; and a causal request beside it."""
    tree = torch.tensor(
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 1]]
    ).bool()
    masks: list[Tensor | None] = [tree, None]
    sequences = Sequences([(5, 2), (0, 1)], [(7, 4), (6, 3)], num_blocks=6)
    out = sequences.attend(sequences.context(masks))
    assert_same(out, sequences.expected(masks))
    hidden = Sequences([(5, 2), (0, 1)], [(7, 4), (6, 3)], num_blocks=6)
    hidden.keys[0][3] += 1000.0  # the first node: rows 1 and 3 do not see it
    again = hidden.attend(hidden.context(masks))
    assert torch.equal(out[[1, 3]], again[[1, 3]]) and not torch.equal(out[[0, 2]], again[[0, 2]])


@pytest.mark.parametrize("step", [2, 3])
def test_the_one_call_path_is_the_loop(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [tuple(range(1 + i * step, 3 + i * step)) for i in range(5)]
    lengths = [(7, 1), (1, 1), (BLOCK, 1), (BLOCK + 1, 1), (2 * BLOCK, 1)]
    together, alone = (Sequences(blocks, lengths, num_blocks=5 * step + 3) for _ in range(2))
    context = together.context()
    assert context._regular() == (BLOCK, step * BLOCK, 2 * BLOCK)
    out = together.attend(context)
    monkeypatch.setattr(PagedContext, "_regular", lambda _: None)
    assert_same(out, alone.attend(alone.context()))
    assert_same(out, alone.expected())


@pytest.mark.parametrize(
    ("blocks", "lengths"),
    [
        ([(0,), (1,), (2,)], [(2, 1)] * 3),  # too few to be worth it
        ([(0,), (1,), (2,), (4,)], [(2, 1)] * 4),  # not evenly spaced
        ([(3,), (2,), (1,), (0,)], [(2, 1)] * 4),  # backwards
        ([(0,), (1,), (2,), (3,)], [(3, 1), (3, 2), (3, 1), (3, 1)]),  # more than one row
        ([(0, 1), (2, 3), (5, 4), (6, 7)], [(6, 1)] * 4),  # one is scattered
        (
            [(0, 1), (3, 4), (6,), (9,)],
            [(8, 1), (2, 1), (2, 1), (2, 1)],
        ),  # the view of the longest leaves the pool at the last
    ],
    ids=["few", "uneven", "backwards", "rows", "scattered", "pool end"],
)
def test_what_is_not_regular_takes_the_loop(blocks: list[tuple[int, ...]], lengths: list[tuple[int, int]]) -> None:
    sequences = Sequences(blocks, lengths, num_blocks=max(max(b) for b in blocks) + 1)
    context = sequences.context()
    assert context._regular() is None
    assert_same(sequences.attend(context), sequences.expected())


SHARED = [(6, 0, 1), (6, 2, 3), (6, 4, 5), (7, 8, 9)]  # three of them begin with block 6, as behind a prefix hit


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [
        ([(11, 3), (12, 3), (9, 3), (10, 3)], True),
        ([(11, 1), (12, 3), (9, 2), (10, 3)], True),  # look-aheads of different lengths
        ([(12, 12), (12, 1), (9, 1), (10, 1)], False),  # a prompt that is read beside answers
        ([(12, 2), (6, 2), (6, 1), (1, 1)], False),  # one long text among short ones
    ],
    ids=["alike", "rows differ", "a prompt", "one long"],
)
def test_a_shared_prefix_is_gathered_for_all_requests_in_one_call(
    lengths: list[tuple[int, int]], padded: bool
) -> None:
    sequences = Sequences(SHARED, lengths, num_blocks=10)
    for own in (sequences.keys, sequences.values):
        own[0][:BLOCK] = own[1][:BLOCK] = own[2][:BLOCK]  # which the pool holds: it was written last
    context = sequences.context()
    assert (context._padded is not None) == padded
    assert_same(sequences.attend(context), sequences.expected())


def test_keys_that_are_views_are_not_copied() -> None:
    assert Sequences([(0, 1), (2, 3)], [(6, 2), (7, 2)], num_blocks=4).context()._padded is None


def test_a_tree_and_a_causal_request_in_one_call() -> None:
    tree = torch.tensor(
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0, 1]]
    ).bool()
    sequences = Sequences([(5, 2), (0, 1)], [(7, 4), (6, 3)], num_blocks=6)
    context = sequences.context([tree, None])
    assert context._padded is not None
    assert_same(sequences.attend(context), sequences.expected([tree, None]))


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(
        st.lists(
            st.tuples(st.integers(1, 13), st.integers(1, 4)).map(lambda kr: (kr[0], min(kr))), min_size=1, max_size=5
        )
    )
    needed = [-(-keys // BLOCK) for keys, _ in lengths]
    order = draw(st.permutations(range(sum(needed) + 2)))
    blocks, start = [], 0
    for count in needed:
        blocks.append(tuple(order[start : start + count]))
        start += count
    return {"blocks": blocks, "lengths": lengths, "num_blocks": len(order), "seed": draw(st.integers(0, 99))}


@settings(max_examples=30, deadline=None)
@given(batches())
def test_any_batch_is_plain_attention(batch: dict[str, Any]) -> None:
    sequences = Sequences(**batch)
    assert_same(sequences.attend(sequences.context()), sequences.expected())


@settings(max_examples=30, deadline=None)
@given(batches())
def test_the_reference_is_attention_written_out(batch: dict[str, Any]) -> None:
    sequences, other = Sequences(**batch), Sequences(**batch)
    assert_same(sequences.by_reference(sequences.context()), sequences.expected())
    other.attend(other.context())
    assert torch.equal(sequences.pool.keys[0], other.pool.keys[0])
    assert torch.equal(sequences.pool.values[0], other.pool.values[0])


def test_the_reference_reads_a_tree_s_mask() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    sequences = Sequences([(2, 0), (1,)], [(5, 2), (3, 1)], num_blocks=3)
    assert_same(sequences.by_reference(sequences.context([mask, None])), sequences.expected([mask, None]))


def test_every_layer_has_its_own_keys() -> None:
    pool = KvPool.allocate(2, 1, BLOCK, (M, D), like=torch.zeros((), dtype=torch.bfloat16))
    context = PagedContext.build(pool, [PagedRequest((0,), 1, 1)], CPU)
    one = torch.ones(1, M, 1, D, dtype=torch.bfloat16)
    out = context.attend(1, torch.ones(1, N, 1, D, dtype=torch.bfloat16), one, 3 * one, SCALE)
    assert out.dtype == torch.bfloat16 and out.unique().tolist() == [3]
    assert pool.keys[0].count_nonzero() == 0 and pool.keys[1][0].unique().tolist() == [1]


def test_a_document_sees_itself_and_what_is_before_it() -> None:
    torch.manual_seed(0)
    ids_BT = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 3, 3]])
    query, key, value = torch.randn(2, N, 7, D), torch.randn(2, M, 7, D), torch.randn(2, M, 7, D)
    out_BTND = DocumentContext(ids_BT).attend(0, query, key, value, SCALE)
    for b in range(2):
        visible = torch.tensor([[ids_BT[b, i] == ids_BT[b, j] and j <= i for j in range(7)] for i in range(7)])
        query_TND, key_TMD, value_TMD = (x[b].transpose(0, 1) for x in (query, key, value))
        assert_same(out_BTND[b], plain_attention(query_TND, key_TMD, value_TMD, visible))


def test_the_registered_function_hands_over_layer_and_scale() -> None:
    class Layer(torch.nn.Module):
        layer_idx = 5

    class Recorder:
        def attend(self, layer: int, query_1NRD: Tensor, key_1MRD: Tensor, value_1MRD: Tensor, scale: float) -> Tensor:
            return torch.tensor([layer, query_1NRD.item(), key_1MRD.item(), value_1MRD.item(), scale])

    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    out, weights = attend_in_context(Layer(), one, two, three, None, scaling=0.25, context=Recorder(), dropout=0.0)
    assert out.tolist() == [5, 1, 2, 3, 0.25] and weights is None
