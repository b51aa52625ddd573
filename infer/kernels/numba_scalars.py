"""Building blocks of the numba kernels: arrays from addresses, bf16 and fp16 as fp32 and back, a vectorising
exponential.

numba keeps compiled kernels on disk and looks at their own file alone: after an edit here, remove the `__pycache__`
folders below `infer/kernels` and `train/ops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.types import float32, int32, int64, uint16, voidptr
from numba.extending import intrinsic, register_jitable
from numba.np.numpy_support import carray

LOWEST = np.int32(-0x7F800001)  # `to_order` of minus infinity
LOG2_E = np.float32(1.4426950408889634)
# Not "nnan" and "ninf": a fault of the model has to stay visible. Python's error model checks every division, which
# keeps loops scalar.
FAST: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}


def inlined(function: Any) -> Any:
    """Have numba inline a function into the kernels that call it.

    It stays a plain function: numba finds a kernel on disk by what it closes over, pickled, and a compiled function
    pickles as a name that each process makes up, a plain one as where it stands in the source.
    """
    return register_jitable(inline="always", **FAST)(function)


def called(function: Any) -> Any:
    """Like `inlined`, for what a kernel calls more than once: inlined by numba twice, a function's variables get in
    each other's way.

    LLVM inlines it all the same.
    """
    return register_jitable(**FAST)(function)


def _cast(result: Any, argument: Any, emit: Any) -> Any:
    """A compiled function of one argument whose body is the LLVM instruction that `emit(builder, value)` adds."""

    def declare(_typing: Any, _argument: Any) -> Any:
        return result(argument), lambda _context, builder, _signature, values: emit(builder, values[0])

    return intrinsic(declare)


pointer = _cast(voidptr, int64, lambda builder, value: builder.inttoptr(value, ir.IntType(8).as_pointer()))
_bits_to_float = _cast(float32, int32, lambda builder, value: builder.bitcast(value, ir.FloatType()))
_float_to_bits = _cast(int32, float32, lambda builder, value: builder.bitcast(value, ir.IntType(32)))
to_int = _cast(
    int32, float32, lambda builder, value: builder.fptosi(value, ir.IntType(32))
)  # numba's own goes through int64


@inlined
def widen_bf16(bits: Any) -> Any:
    return _bits_to_float(np.int32(np.int32(bits) << np.int32(16)))


_half_to_float = _cast(
    float32, uint16, lambda builder, value: builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
)


_float_to_half = _cast(
    uint16, float32, lambda builder, value: builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
)


@inlined
def widen_fp16(bits: Any) -> Any:
    return _half_to_float(bits)


@inlined
def narrow_fp16(value: Any) -> Any:
    """Round to nearest, ties to even."""
    return _float_to_half(np.float32(value))


@inlined
def narrow_bf16(value: Any) -> Any:
    """Round to nearest, ties to even."""
    bits = _float_to_bits(np.float32(value))
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@inlined
def to_order(value: Any) -> Any:
    """int32 in the order of the floats, NaN above all: a maximum of integers vectorises, one of floats would have to
    look for NaN.
    """
    bits = _float_to_bits(np.float32(value))
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def from_order(place: Any) -> Any:
    """The inverse of `to_order`."""
    return _bits_to_float(np.int32(place ^ ((place >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@inlined
def same(value: Any) -> Any:
    return np.float32(value)


@inlined
def row_at(address: Any, size: Any, element: Any) -> Any:
    """An array at an address: a slice of a large array would bring checks into the inner loops."""
    return carray(pointer(address), (size,), element)


@inlined
def exp(x: Any) -> Any:
    """exp in fp32 between -87 and 88, relative error 4e-6 at most (at the ends): a polynomial, since libm's does not
    vectorise.
    """
    lowest, highest = np.float32(-87.0), np.float32(88.0)
    bounded = lowest if x < lowest else highest if x > highest else x  # a NaN stays one
    scaled = bounded * LOG2_E
    whole = np.floor(scaled + np.float32(0.5))
    f = scaled - whole
    # 2^f as a polynomial, written out: a loop over the coefficients would keep the caller's loop from being
    # vectorised.
    p = np.float32(1.5353362e-4) * f + np.float32(1.3398874e-3)
    p = p * f + np.float32(9.6184373e-3)
    p = p * f + np.float32(5.5503324e-2)
    p = p * f + np.float32(2.4022648e-1)
    p = p * f + np.float32(6.9314720e-1)
    p = p * f + np.float32(1.0)
    return p * _bits_to_float(np.int32((to_int(whole) + np.int32(127)) << np.int32(23)))
