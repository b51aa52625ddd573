"""What surrounds matrix products on a CPU: rows padded to a multiple, and bf16 products added to fp32 gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor
from torch.nn import functional as F

from infer.kernels.numba_scalars import FAST, pointer, widen_bf16

# Rows of a product come in multiples: oneDNN compiles each number of rows anew, for as long as the process computes,
# and keeps megabytes of it.
PADDED = 128


def pad_rows(tensor: Tensor) -> Tensor:
    """Zeros behind the rows, to a multiple of `PADDED`; the tensor itself where nothing is missing."""
    if len(tensor) % PADDED == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -len(tensor) % PADDED))


def add_to(total: Tensor, part: Tensor) -> None:
    """total += part. Where fp32 takes bf16, without the copy in fp32 that torch makes first."""
    if total.device.type != "cpu" or (total.dtype, part.dtype) != (torch.float32, torch.bfloat16):
        total += part
        return
    assert total.shape == part.shape and total.is_contiguous(), (total.shape, part.shape, total.stride())
    part = part.contiguous()
    _add_bf16(total.data_ptr(), part.data_ptr(), total.numel())


@njit(cache=True, **FAST)
def _add_bf16(total: Any, part: Any, count: Any) -> None:
    totals, parts = carray(pointer(total), (count,), np.float32), carray(pointer(part), (count,), np.uint16)
    for i in range(count):
        totals[i] += widen_bf16(parts[i])
