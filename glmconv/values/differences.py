"""Compare two tensors block by block, wherever each of them lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from glmconv.basics.dtypes import DType
from glmconv.basics.threads import Meter
from glmconv.source.locate import Located
from glmconv.values.reader import Bits, Reader, floats

EQUAL = "equal"
WIDENED = "widened"
DIFFERS = "differs"
SHAPE = "shape"
MISSING = "missing"
EXTRA = "extra"
NOT_HELD = "not-held"
STATUSES = (EQUAL, WIDENED, DIFFERS, SHAPE, MISSING, EXTRA, NOT_HELD)


@dataclass(slots=True)
class Difference:
    """One tensor of the two checkpoints.

    ``status``: ``equal`` (the same bytes), ``widened`` (the same values; a tensor that Megatron keeps
    in a wider dtype), ``differs`` (in bytes, dtype or both), ``shape``, ``missing`` (only in A),
    ``extra`` (only in B) or ``not-held`` (the table drops it: the other layout has no place for it,
    which is no difference). ``count`` elements of ``elements`` differ, by ``max_abs`` at most, the
    first of them at ``first``; ``max_abs`` is None where a NaN or an infinity meets another value.
    """

    name: str
    status: str
    dtypes: tuple[str, str]
    shapes: tuple[list[int], list[int]]
    elements: int = 0
    count: int = 0
    max_abs: float | None = 0.0
    first: tuple[int, ...] | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "status": self.status,
            "dtypes": list(self.dtypes),
            "shapes": list(self.shapes),
            "elements": self.elements,
            "count": self.count,
            "max_abs": self.max_abs,
            "first": None if self.first is None else list(self.first),
            "note": self.note,
        }


def compare(
    readers: tuple[Reader, Reader],
    a: Located,
    b: Located,
    name: str,
    meter: Meter | None = None,
    note: str = "",
) -> Difference:
    """Compare two tensors block by block; equal dtypes by their bits, others by their values."""
    shapes = (list(a.tensor.shape), list(b.tensor.shape))
    result = Difference(name, EQUAL, (a.dtype.label, b.dtype.label), shapes, note=note)
    if a.tensor.shape != b.tensor.shape:
        result.status, result.max_abs = SHAPE, None
        return result
    for left, right in zip(readers[0].blocks(a), readers[1].blocks(b), strict=True):
        result.elements += left.bits.size
        unequal = _unequal(left.bits, a.dtype, right.bits, b.dtype)
        if unequal is not None:
            apart = _distance(left.bits, a.dtype, right.bits, b.dtype)
            _note_block(result, (left.row, left.col), unequal, apart)
        if meter is not None:
            meter.add(left.bits.nbytes + right.bits.nbytes)
    if result.count or a.dtype is not b.dtype:
        locked = a.tensor.lock is not None or b.tensor.lock is not None
        result.status = DIFFERS if result.count or not locked else WIDENED
    return result


def _unequal(left: Bits, a: DType, right: Bits, b: DType) -> Bits | None:
    """Mask of differing elements, or None where all are equal."""
    if a is b:
        if np.array_equal(left, right):
            return None
        different: Bits = left != right
        return different
    x, y = floats(left, a).astype(np.float64), floats(right, b).astype(np.float64)
    unequal: Bits = (x != y) & ~(np.isnan(x) & np.isnan(y))
    return unequal if unequal.any() else None


def _distance(left: Bits, a: DType, right: Bits, b: DType) -> Bits:
    with np.errstate(invalid="ignore"):
        apart: Bits = np.abs(floats(left, a).astype(np.float64) - floats(right, b).astype(np.float64))
    return apart


def _note_block(result: Difference, corner: tuple[int, int], unequal: Bits, distance: Bits) -> None:
    result.count += int(np.count_nonzero(unequal))
    largest = float(distance[unequal].max())
    if result.max_abs is not None:
        result.max_abs = max(result.max_abs, largest) if np.isfinite(largest) else None
    if result.first is None:
        i, j = divmod(int(np.argmax(unequal)), unequal.shape[1])
        result.first = _index(corner[0] + i, corner[1] + j, result.shapes[0])


def _index(row: int, col: int, shape: list[int]) -> tuple[int, ...]:
    """The index in ``shape`` of an element of its 2-D view."""
    if not shape:
        return ()
    inner: list[int] = []
    for size in reversed(shape[1:]):
        inner.insert(0, col % size)
        col //= size
    return (row, *inner)
