"""The row kernels against their plain twins, and the law that a row does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.kernels.attention import cpu as attention_cpu
from infer.kernels.attention import reference as paged_reference
from infer.kernels.attention.kv_pool import KvPool
from infer.kernels.attention.paged import FEW_ROWS, PagedContext, PagedRequest
from infer.kernels.decoder_layer import cpu, op, reference
from infer.kernels.decoder_layer.reference import rotate
from infer.kernels.warm_up import compile_now

QUERIES, HEADS, SIZE, BLOCK = 6, 2, 16, 4
DTYPES = [torch.bfloat16, torch.float32]


def _close(found: Tensor, expected: Tensor) -> None:
    exact = found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-6 if exact else 8e-3, atol=2e-6 if exact else 8e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norms(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    x, y = ((torch.randn(3, 7, 48) * scale + scale).to(dtype) for _ in range(2))
    weight, other = (torch.rand(48).to(dtype) + 0.5 for _ in range(2))
    _close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    _close(cpu.rms_norm(x[:, ::2], weight, 1e-5), reference.rms_norm(x[:, ::2], weight, 1e-5))
    _close(cpu.pair_norm(x, weight, y, other, 1e-5), reference.pair_norm(x, weight, y, other, 1e-5))
    total, normed = cpu.add_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    _close(normed, reference.add_norm(x, y, weight, 1e-5)[1])


def test_other_dtypes_are_left_to_torch() -> None:
    x, weight = torch.randn(2, 8).double(), torch.rand(8).double()
    assert torch.equal(op.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(op.pair_norm(x, weight, x, weight, 1e-5), reference.pair_norm(x, weight, x, weight, 1e-5))
    for mine, plain in zip(op.add_norm(x, x, weight, 1e-5), reference.add_norm(x, x, weight, 1e-5), strict=True):
        assert torch.equal(mine, plain)
    assert torch.equal(op.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_over_the_whole_range(dtype: torch.dtype) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 997), torch.tensor([0.0, -1e4, 1e4])]).to(dtype)
    gate_up = torch.cat([gate, torch.linspace(-3, 3, 1000).to(dtype)])[None]
    found, expected = cpu.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(found, expected, rtol=5e-6 if dtype == torch.float32 else 8e-3, atol=1e-30)


def test_a_fault_of_the_model_stays_visible() -> None:
    x, ones = torch.tensor([[float("nan"), 1.0]]), torch.ones(2)
    assert cpu.rms_norm(x, ones, 1e-5).isnan().all()
    assert cpu.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()
    pool, requests, qkv, cos_sin = _batch(torch.float32, False)
    pool.keys[0][BLOCK] = float("nan")  # the first key of the first request
    found = PagedContext.build(pool, requests, qkv.device).rotate_and_attend(0, qkv, cos_sin, 0.25)[0]
    assert found[:4].isnan().all() and not found[4:].isnan().any()


def _batch(dtype: torch.dtype, masked: bool) -> tuple[KvPool, list[PagedRequest], Tensor, tuple[Tensor, Tensor]]:
    """Three requests: contiguous blocks, scattered blocks, and one row alone; `masked`: the first as a tree."""
    torch.manual_seed(1)
    pool = KvPool.allocate(1, 16, BLOCK, (HEADS, SIZE), like=torch.zeros(1, dtype=dtype))
    for side in (pool.keys[0], pool.values[0]):
        side.copy_(torch.randn(side.shape))
    mask = torch.rand(4, 13) < 0.6
    mask[:, 0] = True
    requests = [
        PagedRequest((1, 2, 3, 4), 13, 4, mask if masked else None),
        PagedRequest((9, 7, 12), 10, 3),
        PagedRequest((6,), 1, 1),
    ]
    qkv = torch.randn(1, 8, (QUERIES + 2 * HEADS) * SIZE).to(dtype)
    angles = torch.rand(1, 8, SIZE // 2).repeat(1, 1, 2) * 6
    return pool, requests, qkv, (angles.cos(), angles.sin())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_contexts_attention(dtype: torch.dtype, masked: bool) -> None:
    pool, requests, qkv, cos_sin = _batch(dtype, masked)
    other = KvPool(tuple(t.clone() for t in pool.keys), tuple(t.clone() for t in pool.values), pool.block_size)
    context = PagedContext.build(pool, requests, qkv.device)
    assert context.in_rows
    found = context.rotate_and_attend(0, qkv, cos_sin, 0.25)
    cos, sin = cos_sin
    heads = qkv.unflatten(-1, (-1, SIZE))
    rotated = rotate(heads[..., : QUERIES + HEADS, :], cos, sin)
    whole = torch.cat([rotated, heads[..., QUERIES + HEADS :, :]], dim=2).transpose(1, 2)
    query, key, value = whole.split([QUERIES, HEADS, HEADS], dim=1)
    _close(found, PagedContext.build(other, requests, qkv.device).attend(0, query, key, value, 0.25).flatten(-2))
    third = KvPool(tuple(t.clone() for t in other.keys), tuple(t.clone() for t in other.values), pool.block_size)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    _close(found[0], paged_reference.attend(query, key, value, third, 0, requests, 0.25).flatten(-2))
    _close(pool.keys[0], other.keys[0])
    assert torch.equal(pool.values[0], other.values[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    """What makes greedy tokens of a verification those of single steps, in bf16 too."""
    pool, requests, qkv, cos_sin = _batch(dtype, False)
    together = PagedContext.build(pool, requests[:1], qkv.device).rotate_and_attend(
        0, qkv[:, :4].contiguous(), cos_sin, 0.25
    )
    keys = pool.keys[0].clone()
    for i in range(4):
        alone = PagedContext.build(pool, [PagedRequest((1, 2, 3, 4), 10 + i, 1)], qkv.device)
        own = (cos_sin[0][:, i : i + 1].contiguous(), cos_sin[1][:, i : i + 1].contiguous())
        assert torch.equal(alone.rotate_and_attend(0, qkv[:, i : i + 1].contiguous(), own, 0.25)[0, 0], together[0, i])
    assert torch.equal(pool.keys[0], keys)
    gate_up, x, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 48).to(dtype), torch.rand(48).to(dtype)
    assert torch.equal(cpu.silu_mul(gate_up)[3:4], cpu.silu_mul(gate_up[3:4]))
    assert torch.equal(cpu.add_norm(x, x, weight, 1e-5)[1][3:4], cpu.add_norm(x[3:4], x[3:4], weight, 1e-5)[1])


def test_many_rows_are_left_to_torch() -> None:
    pool, _, qkv, _ = _batch(torch.float32, False)
    assert not PagedContext.build(pool, [PagedRequest((1, 2, 3, 4), FEW_ROWS + 1, FEW_ROWS + 1)], qkv.device).in_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_compiled_after_compile_now(dtype: torch.dtype) -> None:
    """A draft process that compiled in its first round would be taken for dead."""
    compile_now(torch.zeros(1, dtype=dtype))
    kernels = [*cpu._KERNELS[dtype], attention_cpu._KERNELS[dtype]]
    before = [len(kernel.signatures) for kernel in kernels]
    pool, requests, qkv, cos_sin = _batch(dtype, True)
    PagedContext.build(pool, requests, qkv.device).rotate_and_attend(0, qkv, cos_sin, 0.25)
    x, weight = torch.randn(3, 48).to(dtype), torch.rand(48).to(dtype)
    cpu.pair_norm(x, weight, x, weight, 1e-5)
    cpu.add_norm(x, x, weight, 1e-5)
    cpu.silu_mul(x)
    assert [len(kernel.signatures) for kernel in kernels] == before and min(before) > 0
