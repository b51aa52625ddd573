"""Gradients of linear layers that are called many times in one loss: one product over the rows of all calls, not one
for each.

An unroll calls a layer once a step with as many rows as there are anchors. On a CPU the sum of so many small gradients
takes longer than their products, and rounds in the weight's dtype of the forward pass each time; here rows are put
together and sums kept in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.ops.products import add_to, pad_rows

ROWS = 2048  # put together before they are multiplied: bounds what is kept of a long unroll


@contextmanager
def gathered_over_calls(module: nn.Module) -> Iterator[None]:
    """Within, the bias-free linear layers below `module` work this way. Backward may follow outside; recomputed
    forwards may not.

    For weights that are whole in this process: an exchange that waits for one layer's gradient gets it at the end of
    the backward pass.
    """
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and layer.bias is None and layer.weight.requires_grad
    ]
    calls = [_Calls(layer.weight) for layer in layers]
    for layer, its_calls in zip(layers, calls, strict=True):
        layer.forward = its_calls.run
    try:
        yield
    finally:
        for layer, its_calls in zip(layers, calls, strict=True):
            del layer.forward
            its_calls.shared = None  # the graph knows the calls: without this it would wait for the garbage collector


class _Calls:
    """Those of one layer in one loss: rows [n, in] and their gradients [n, out], until they are multiplied."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.shared: Tensor | None = None
        self.total: Tensor | None = None
        self.rows: list[tuple[Tensor, Tensor]] = []

    def run(self, input: Tensor) -> Tensor:
        """The layer's forward. The first call makes the copy of the weight that all calls read."""
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        if self.shared is None:
            self.shared = _Weight.apply(self.weight, self, dtype)
        return _Call.apply(input.to(dtype), self.shared, self)  # type: ignore[no-any-return]

    def add(self, x: Tensor, grad: Tensor) -> None:
        """Keep the rows of one call. Many rows are multiplied by themselves: to copy them would gain nothing."""
        rows = x.flatten(0, -2), grad.flatten(0, -2)
        if sum(len(x) for x, _ in (*self.rows, rows)) > ROWS:
            self.multiply()
        self.rows.append(rows)

    def multiply(self) -> None:
        """Add what the kept rows give to the sum."""
        if not self.rows:
            return
        x, grad = (
            self.rows[0]
            if len(self.rows) == 1
            else (pad_rows(torch.cat(side)) for side in zip(*self.rows, strict=True))
        )
        self.rows.clear()
        part = grad.T @ x
        if self.total is None:
            self.total = part.to(self.weight.dtype)
        else:
            add_to(self.total, part)


class _Weight(torch.autograd.Function):
    """The weight in another dtype; its gradient is what all calls have given, when the last of them has gone back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, calls: _Calls, dtype: torch.dtype) -> Tensor:
        ctx.calls = calls
        return weight.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: None) -> Any:
        calls: _Calls = ctx.calls
        calls.multiply()
        total, calls.total = calls.total, None
        return total, None, None


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: Tensor, calls: _Calls) -> Tensor:
        ctx.save_for_backward(x, shared)
        ctx.calls = calls
        return F.linear(x, shared)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, shared = ctx.saved_tensors
        ctx.calls.add(x, grads[0])
        return (grads[0] @ shared if ctx.needs_input_grad[0] else None), None, None
