"""Kernels compiled by one process are found on disk by the next: what they close over has to pickle alike in every
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from infer.kernels.attention import cpu as paged_attention
from infer.kernels.decoder_layer import cpu as decoder_layer
from train.ops.attention import cpu as unroll_attention
from train.ops.head_loss import cpu as head_loss
from train.ops.layer import cpu as layer_with_gradients

KERNELS = [*head_loss._KERNELS.values(), *head_loss._PROBABILITIES.values(), *paged_attention._KERNELS.values()]
KERNELS += [
    kernel
    for module in (unroll_attention, decoder_layer, layer_with_gradients)
    for kernels in module._KERNELS.values()
    for kernel in kernels
]


def closed_over(function: Any) -> Iterator[Any]:
    """What a function's closure holds, and the closures of the functions in it."""
    for cell in function.__closure__ or ():
        yield cell.cell_contents
        if callable(cell.cell_contents) and hasattr(cell.cell_contents, "__closure__"):
            yield from closed_over(cell.cell_contents)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.py_func.__qualname__)
def test_a_kernel_closes_over_no_compiled_function(kernel: Any) -> None:
    """numba gives a compiled function a new random name in each process, and so would look for the kernel under
    another key.
    """
    held = list(closed_over(kernel.py_func))
    assert held and not [thing for thing in held if isinstance(thing, Dispatcher)]
