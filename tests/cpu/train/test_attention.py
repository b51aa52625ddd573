"""Attention of the unroll, with a compiled softmax and with torch's, against the reference in value and gradient; the
reference against a softmax written out; what is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from train.ops.attention import cpu, recompute, reference
from train.ops.attention.op import attend, attend_rows
from train.ops.attention.span import Span

B, T, A, N, M, D = 2, 23, 5, 4, 2, 8


class Case:
    """Random queries and keys, runs of seen slots; of several queries of an anchor, each sees the own keys up to it,
    and one more.
    """

    def __init__(self, queries: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(queries)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

        self.query = draw(B, A * queries, N, D)
        self.prefix = draw(B, T, M, D), draw(B, T, M, D)
        self.own = [(draw(B, A * queries, M, D), draw(B, A * queries, M, D)), (draw(B, A, M, D), draw(B, A, M, D))]
        start = torch.randint(0, 8, (B, A), generator=generator)
        stop = start + torch.randint(1, T - 8, (B, A), generator=generator)
        slots = torch.arange(T)
        self.slots = (slots >= start[..., None]) & (slots < stop[..., None])
        self.start, self.stop = start, stop
        own = torch.ones(1, 1, queries, queries + 1, dtype=torch.bool)
        own[0, 0, :, :queries] = torch.ones(queries, queries, dtype=torch.bool).tril()
        self.mask = None if queries == 1 else own

    def attend(self) -> Tensor:
        key, value = (x.transpose(1, 2) for x in self.prefix)
        return attend(self.query, (key, value), Span(self.start, self.stop, self.mask), self.own)

    def reference(self) -> Tensor:
        key, value = (x.transpose(1, 2) for x in self.prefix)
        return reference.attend(self.query, (key, value), Span(self.start, self.stop, self.mask), self.own)

    def leaves(self) -> list[Tensor]:
        return [self.query, *self.prefix, *(x for pair in self.own for x in pair)]

    def plain(self) -> Tensor:
        """Softmax over all keys of each query, written out."""
        queries = self.query.shape[1] // A
        own_k, own_v = (
            torch.cat([x.view(B, A, -1, M, D) for x in parts], dim=2) for parts in zip(*self.own, strict=True)
        )
        own_seen = torch.ones(1, 1, queries, own_k.shape[2], dtype=torch.bool) if self.mask is None else self.mask
        result = torch.empty_like(self.query).float().tolist()
        for b in range(B):
            for slot in range(A * queries):
                a, j = divmod(slot, queries)
                seen = torch.cat((self.slots[b, a], own_seen[0, 0, j]))
                for n in range(N):
                    m = n * M // N
                    keys = torch.cat((self.prefix[0][b, :, m], own_k[b, a, :, m]))[seen].float()
                    values = torch.cat((self.prefix[1][b, :, m], own_v[b, a, :, m]))[seen].float()
                    weights = (keys @ self.query[b, slot, n].float() * D**-0.5).softmax(0)
                    result[b][slot][n] = weights @ values
        return torch.stack([torch.stack([torch.stack(heads) for heads in row]) for row in result])


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the softmax."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "available", lambda x: False)
    return request.param


@pytest.mark.parametrize("queries", [1, 3])
def test_the_reference_is_attention_written_out(queries: int) -> None:
    case = Case(queries, torch.float32)
    torch.testing.assert_close(case.reference(), case.plain(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_values_and_gradients_are_the_reference_s(queries: int, way: str) -> None:
    case = Case(queries, torch.float32)
    out, plain = case.attend(), case.reference()
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    for own, expected in zip(
        torch.autograd.grad(out, case.leaves(), grad), torch.autograd.grad(plain, case.leaves(), grad), strict=True
    ):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_bf16_is_near(queries: int, way: str) -> None:
    case = Case(queries, torch.bfloat16)
    out = case.attend()
    plain = case.plain()
    torch.testing.assert_close(out.float(), plain, rtol=3e-2, atol=3e-2)
    ones = torch.ones(out.shape)
    found, wanted = (
        torch.autograd.grad(out, case.leaves(), ones.bfloat16()),
        torch.autograd.grad(plain, case.leaves(), ones),
    )
    for own, expected in zip(found, wanted, strict=True):
        assert (own.float() - expected.float()).norm() < 0.03 * expected.float().norm()


@pytest.mark.parametrize("softmax", [cpu, reference, None], ids=["compiled", "torch", "as chosen"])
def test_rows_in_blocks_are_plain_attention(softmax: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents a row; blocks that are not whole, and that begin within a document."""
    monkeypatch.setattr(recompute, "BLOCK", 5)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(B, T, heads, D, generator=generator).requires_grad_() for heads in (N, M, M))
    slots, begins = torch.arange(T).expand(B, T), torch.tensor([9, 14])[:, None]
    span = Span(torch.where(slots < begins, 0, begins), slots + 1)
    if softmax is None:
        out = attend_rows(query, key, value, span)
    else:
        out: Tensor = recompute.AttendRows.apply(softmax, query, key, value, span)  # type: ignore[assignment]
    plain = reference.attend_rows(query, key, value, span)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
    grad = torch.randn(out.shape, generator=generator)
    grads = (torch.autograd.grad(each, (query, key, value), grad) for each in (out, plain))
    for own, expected in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_the_reference_of_rows_is_torch_s_attention() -> None:
    query, key, value = (torch.randn(B, T, heads, D) for heads in (N, M, M))
    stop = torch.arange(T).expand(B, T) + 1
    span = Span((stop - 4).clamp(min=0), stop)
    seen = reference.seen_slots(span, T)
    assert seen[0].int().sum(-1).tolist() == [1, 2, 3, *[4] * (T - 3)]
    by_head = [x.transpose(1, 2) for x in (query, key, value)]
    plain = F.scaled_dot_product_attention(*by_head, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(reference.attend_rows(query, key, value, span), plain, rtol=1e-4, atol=1e-5)


def test_nothing_as_long_as_a_row_is_kept() -> None:
    case, kept = Case(1, torch.float32), []
    with saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
        case.attend()
    assert sum(kept) == sum(x.numel() for x in case.leaves()) + case.query.numel() + case.query.numel() // D


def test_ways_agree_to_rounding() -> None:
    """The two functions between the products, side by side on one input."""
    generator = torch.Generator().manual_seed(0)
    rows = N // M * A
    q, grad, output = (torch.randn(B, M, rows, D, generator=generator) for _ in range(3))
    far, far_grad = (torch.randn(B, M, rows, T, generator=generator) for _ in range(2))
    own_k, own_v = (torch.randn(B, A, 4, M, D, generator=generator) for _ in range(2))
    start = torch.zeros(B, A, dtype=torch.int64)
    span = Span(start, start + 9, torch.tensor([True, False, True, True]).expand(1, 1, 1, 4))
    one, two = (far.clone(), far_grad.clone()), (far.clone(), far_grad.clone())
    near, normaliser = cpu.softmax(q, far.clone(), own_k, own_v, span)
    expected, sums = reference.softmax(q, far.clone(), own_k, own_v, span)
    torch.testing.assert_close((near, normaliser), (expected, sums), rtol=1e-5, atol=1e-5)
    found = cpu.softmax_gradient((q, grad, output), *one, own_k, own_v, normaliser, span)
    wanted = reference.softmax_gradient((q, grad, output), *two, own_k, own_v, normaliser, span)
    torch.testing.assert_close((*found, *one), (*wanted, *two), rtol=1e-4, atol=1e-4)
