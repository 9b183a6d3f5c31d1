"""Rows of bytes moved between strided places in memory. Imports numpy: loaded only when a plan needs it."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from glmconv.basics.dtypes import DType
from glmconv.engine.casts import cast_block
from glmconv.engine.rounding import Rounding

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray


def grid(buffer: memoryview, rows: int, width: int, stride: int, unit: int = 1) -> NDArray[Any]:
    """The first ``rows`` rows of ``width`` bytes, ``stride`` apart, as elements of ``unit`` bytes.

    Raises ValueError when the buffer is too short for them.
    """
    shape, strides = (rows, width // unit), (stride, unit)
    return np.ndarray(shape, dtype=f"u{unit}", buffer=buffer, strides=strides)


def scatter(
    read: memoryview, read_stride: int, view: memoryview, view_stride: int, shape: tuple[int, int]
) -> None:
    """Copy ``shape`` = (rows, bytes a row) from rows in ``read`` to rows in ``view``."""
    rows, width = shape
    # The widest element that fits both sides: numpy moves narrow rows element by element.
    unit = gcd(gcd(width, 8), gcd(read_stride, view_stride))
    grid(view, rows, width, view_stride, unit)[...] = grid(read, rows, width, read_stride, unit)


def dense_rows(read: memoryview, rows: int, width: int, stride: int) -> memoryview:
    """Rows put end to end."""
    return memoryview(grid(read, rows, width, stride).tobytes())


def cast_bytes(data: memoryview, cast: tuple[DType, DType], tally: Rounding) -> memoryview:
    """Dense elements cast from the first type to the second; ``tally`` counts. CastOverflow on overflow."""
    return cast_block(data, *cast, tally).data.cast("B")
