"""The training kernels against autograd through plain torch: value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train.ops import cpu_train

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
    x, weight = (torch.randn(2, 5, 48) * 3).to(dtype), torch.rand(48) + 0.5
    _check(lambda x, w: cpu_train.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (48,), w, 1e-5), (x, weight), dtype)
    strided = (torch.randn(2, 48, 5) * 3).to(dtype).transpose(1, 2)
    _check(
        lambda x, w: cpu_train.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (48,), w, 1e-5),
        (strided, weight),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(3, 7, 33) * 4).to(dtype), torch.randn(3, 7, 33).to(dtype)
    gate[0, 0, :4] = torch.tensor([0.0, -100.0, 100.0, -40.0])
    _check(cpu_train.silu_mul, lambda g, u: F.silu(g) * u, (gate, up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    angles = (torch.rand(2, 5, 1, 8) * 6).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin

    _check(lambda x: cpu_train.rotate(x, cos, sin), plain, (torch.randn(2, 5, 3, 16).to(dtype),), dtype)


def test_other_dtypes_are_left_to_torch() -> None:
    assert not cpu_train.available(torch.zeros(1, dtype=torch.float64))
    assert not cpu_train.available(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
