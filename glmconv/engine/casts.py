"""Casts between plain floating-point types, block by block.

Every cast rounds once, to nearest, ties to even. A widening cast is exact. A NaN stays a NaN. A
finite value that the narrower type can only call infinite is an error, never a silent infinity; one
that it can only call zero or subnormal is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.engine.rounding import CastOverflow, Rounding

if TYPE_CHECKING:
    from typing import Any

    Array = NDArray[Any]

_STORED = {DType.F16: np.float16, DType.BF16: np.uint16, DType.F32: np.float32, DType.F64: np.float64}

# Sign apart: the bits of the least normal number and of infinity, and the unsigned type that holds them.
_SMALLEST = {
    DType.F16: (0x0400, 0x7C00, np.uint16),
    DType.BF16: (0x0080, 0x7F80, np.uint16),
    DType.F32: (0x00800000, 0x7F800000, np.uint32),
}


def cast_block(data: memoryview, source: DType, target: DType, tally: Rounding | None = None) -> Array:
    """Elements of ``data`` (dense, of type ``source``) as a dense array of ``target`` bytes (uint8).

    ``tally`` takes what underflows. Raises DataError for a pair that is no cast of plain floats,
    :class:`CastOverflow` with the block's own count where values do not fit.
    """
    if not (source.is_plain_float and target.is_plain_float):
        raise DataError(f"no cast from {source.label} to {target.label}: only plain floats are cast")
    values = np.frombuffer(data, dtype=_STORED[source])
    if source is target:
        return values.view(np.uint8)
    wide = _widened_bf16(values) if source is DType.BF16 else values
    with np.errstate(over="ignore", invalid="ignore"):
        out = _to_bf16(wide) if target is DType.BF16 else wide.astype(_STORED[target])
    if source.itemsize > target.itemsize or (source, target) == (DType.BF16, DType.F16):
        _look(wide, out, source, target, tally)
    return out.view(np.uint8)


def _widened_bf16(bits: Array) -> Array:
    """BF16 is the upper half of an F32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: Array) -> Array:
    """The nearest BF16's bits, ties to even, by integer arithmetic on the F32's bits."""
    single = _rounded_to_odd(values) if values.dtype == np.float64 else values.astype(np.float32, copy=False)
    bits = single.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # The addition would carry a NaN's payload into infinity or zero: keep sign and payload, set quiet.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded[nan] = ((bits[nan] >> 16) | 0x40).astype(np.uint16)
    return rounded


def _rounded_to_odd(values: Array) -> Array:
    """F64 to F32 with inexact results made odd, so that the second rounding, to BF16, is correct."""
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32).copy()
    inexact = (back != values) & ~np.isnan(values)
    # One step towards zero where rounding went away from zero: then all inexact ones are truncated.
    bits[inexact & (np.abs(back) > np.abs(values))] -= 1
    bits[inexact] |= 1
    return bits.view(np.float32)


def _look(wide: Array, out: Array, source: DType, target: DType, tally: Rounding | None) -> None:
    """Raise CastOverflow for finite values that became infinite; count those that left the normal range."""
    normal, infinite, bits = _SMALLEST[target]
    magnitude = out.view(bits) & bits(infinite | (infinite - 1))
    if magnitude.max(initial=0) >= infinite:
        lost = np.abs(wide[(magnitude == infinite) & np.isfinite(wide)])
        if lost.size:
            raise CastOverflow(int(lost.size), float(lost.max()), source, target)
    if tally is not None and magnitude.min(initial=normal) < normal:
        zero = magnitude == 0
        tally.to_zero += int(np.count_nonzero(wide[zero]))
        tally.to_subnormal += int(np.count_nonzero(magnitude < normal)) - int(np.count_nonzero(zero))
