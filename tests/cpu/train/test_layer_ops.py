"""The compiled layer operations of training against plain torch, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from train.ops.layer import cpu, op, reference

DTYPES = [torch.bfloat16, torch.float32]


def _check(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """The plain one in fp32 on the same numbers; bf16 results may differ by their rounding."""
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().float().requires_grad_() for x in inputs]
    found, expected = ours(*mine), plain(*theirs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(found.shape).to(dtype)
    found.backward(grad)
    expected.backward(grad.float())
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None and a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.float(), b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.rand(48) + 0.5
    strided = (torch.randn(2, 48, 5) * 3).to(dtype).transpose(1, 2)
    for x in ((torch.randn(2, 5, 48) * 3).to(dtype), strided):
        _check(lambda x, w: cpu.rms_norm(x, w, 1e-5), lambda x, w: reference.rms_norm(x, w, 1e-5), (x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(3, 7, 33) * 4).to(dtype), torch.randn(3, 7, 33).to(dtype)
    gate[0, 0, :4] = torch.tensor([0.0, -100.0, 100.0, -40.0])
    _check(cpu.silu_mul, reference.silu_mul, (gate, up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    angles = (torch.rand(2, 5, 8) * 6).repeat(1, 1, 2)
    tables, x = (angles.cos(), angles.sin()), torch.randn(2, 5, 3, 16).to(dtype)
    _check(lambda x: cpu.rotate(x, *tables), lambda x: reference.rotate(x, *tables), (x,), dtype)


def test_rotation_is_the_formula() -> None:
    angles, x = (torch.rand(2, 5, 8) * 6).repeat(1, 1, 2), torch.randn(2, 5, 3, 16)
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    plain = x * cos + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin
    torch.testing.assert_close(reference.rotate(x, angles.cos(), angles.sin()), plain)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    assert not cpu.available(torch.zeros(1, dtype=torch.float64))
    assert not cpu.available(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
    x, weight = torch.randn(2, 3, 8), torch.rand(8)
    for dtypes in ((torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16)):  # the second: a bf16 weight
        mine, w = x.to(dtypes[0]), weight.to(dtypes[1])
        assert torch.equal(op.rms_norm(mine, w, 1e-5), reference.rms_norm(mine, w, 1e-5))
    heads, angles = torch.randn(2, 3, 4, 8), torch.rand(1, 3, 4).repeat(1, 1, 2)  # one table for two rows
    tables = angles.cos(), angles.sin()
    assert torch.equal(op.rotate(heads, *tables), reference.rotate(heads, *tables))
