"""Gradients of linear layers gathered over the calls of one loss: those of plain autograd."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.train.small import TWO_ROWS, ProductRows, exact_pair
from train.objective.unroll import Rows, unroll
from train.ops import weight_gradients
from train.ops.weight_gradients import gathered_over_calls


def unrolled(gathers: bool, depth: int, layers: int = 2) -> list[Tensor | None]:
    drafter, features = exact_pair(layers, TWO_ROWS, length=13)
    rows = Rows(features.token_ids, features.positions, features.document_ids)
    anchors = torch.tensor([[1, 2, 8], [2, 6, 7]])

    def loss() -> Tensor:
        return torch.stack(
            [hidden.square().mean() for hidden in unroll(drafter, rows, drafter.fuse(features.taps), anchors, depth)]
        ).sum()

    if gathers:
        with gathered_over_calls(drafter):
            total = loss()
    else:
        total = loss()
    total.backward()
    return [parameter.grad for parameter in drafter.parameters()]


@pytest.mark.parametrize("together", [1, 7, 2048])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_gradients_are_those_of_plain_autograd(depth: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "ROWS", together)
    plain, gathered = unrolled(False, depth), unrolled(True, depth)
    torch.testing.assert_close(gathered, plain, rtol=1e-12, atol=1e-14)
    assert sum(grad is not None for grad in plain) == len(plain) - 3  # embeddings, last norm and head take no part


def layer(inputs: int = 3, outputs: int = 2) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=False)


def test_the_rows_of_all_calls_are_one_product() -> None:
    linear = layer(200, 100)
    with gathered_over_calls(linear):
        outputs = [linear(torch.randn(50, 200)) for _ in range(5)]
    with ProductRows() as seen:
        torch.stack(outputs).sum().backward()
    assert seen.rows == [256]  # 250, padded; inputs need no gradient


def test_several_losses_add_up() -> None:
    linear, x = layer(), torch.randn(2, 4, 3)
    for part in x:
        with gathered_over_calls(linear):
            loss = linear(part).square().sum()
        loss.backward()
    found = linear.weight.grad
    linear.zero_grad()
    linear(x).square().sum().backward()
    torch.testing.assert_close(found, linear.weight.grad)


def test_sums_of_bf16_are_exact() -> None:
    """In bf16 256 + 1 is 256: a sum of 300 gradients of 1 would stay there."""
    linear = layer(1, 1)
    with torch.autocast("cpu", torch.bfloat16), gathered_over_calls(linear):
        outputs = torch.stack([linear(torch.ones(1, 1)) for _ in range(300)])
    outputs.sum().backward()
    assert outputs.dtype == torch.bfloat16
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32
    assert float(linear.weight.grad) == 300


def test_a_layer_that_is_frozen_or_has_a_bias_or_is_called_without_gradients_is_left_alone() -> None:
    frozen, biased, linear = layer().requires_grad_(False), nn.Linear(3, 2), layer()
    x = torch.randn(4, 3, requires_grad=True)
    with gathered_over_calls(nn.ModuleList([frozen, biased, linear])):
        assert "forward" not in vars(frozen) and "forward" not in vars(biased)
        with torch.no_grad():
            assert linear(x).grad_fn is None
        linear(x).sum().backward()
    assert linear.weight.grad is not None


def test_layers_are_as_before_afterwards_whatever_happens() -> None:
    linear = layer()
    with pytest.raises(ValueError, match="on the way"), gathered_over_calls(linear):
        raise ValueError("on the way")
    assert "forward" not in vars(linear)


def test_what_is_kept_ends_with_the_graph() -> None:
    linear = layer()
    gc.collect()
    gc.disable()
    try:
        with gathered_over_calls(linear):
            calls = weakref.ref(vars(linear)["forward"].__self__)
            loss = linear(torch.randn(4, 3)).sum()
        loss.backward()
        assert calls() is not None
        del loss
        assert calls() is None
    finally:
        gc.enable()
