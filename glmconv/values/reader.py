"""Read tensors of any source block by block, in bounded memory, without torch.

A block is a rectangle of a tensor's 2-D view (``shape[0]`` rows, the rest columns) as unsigned
integers of the element's width: the bits as they are stored. :func:`floats` gives their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.formats.stored import StoredTensor
from glmconv.source.locate import Located, Piece
from glmconv.storage.objects import OpenObject, StorageObject
from glmconv.storage.opened import OpenObjects
from glmconv.tables.expand import HfTensor, view2d

WINDOW = 1 << 20
"""Elements of one block: 2 MiB of bf16, 4 MiB of fp32."""

WASTE = 4
"""A strided range is read as a whole while at most one byte in this many is wanted."""

Bits = NDArray[Any]
"""Unsigned integers of an element's width, ``[rows, columns]``."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INTEGERS = {
    DType.BOOL: np.uint8,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.I16: np.int16,
    DType.U16: np.uint16,
    DType.I32: np.int32,
    DType.U32: np.uint32,
    DType.I64: np.int64,
    DType.U64: np.uint64,
}


@dataclass(frozen=True, slots=True)
class Block:
    """``bits[i, j]`` is element ``(row + i, col + j)``; valid until the reader's next block."""

    row: int
    col: int
    bits: Bits


def floats(bits: Bits, dtype: DType) -> NDArray[Any]:
    """Values of stored bits: float32 for BF16, F16 and F32, float64 for the rest (exact to 2**53).

    Raises DataError for dtypes whose values need more than their bits (FP8 and its scales).
    """
    if dtype is DType.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype is DType.F16:
        return bits.view(np.float16).astype(np.float32)
    if dtype is DType.F32:
        return bits.view(np.float32)
    if dtype is DType.F64:
        return bits.view(np.float64)
    if dtype in _INTEGERS:
        return bits.view(_INTEGERS[dtype]).astype(np.float64)
    raise DataError(f"values of {dtype.label} are not read", hint="compare such tensors by their bytes")


def rounded(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """``values`` rounded to nearest even as a cast to ``dtype`` does, as float32 or float64."""
    if dtype is DType.BF16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        up = ((bits >> 16) & 1) + np.uint32(0x7FFF)
        kept = (bits + up) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(values), kept.view(np.float32), values)
    if dtype is DType.F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values.astype(np.float64 if dtype is DType.F64 else np.float32)


def stored_view(tensor: StoredTensor, index: tuple[int, ...] = (), first_row: int = 0) -> Located:
    """A stored tensor (the element ``index`` of its leading axes) in stored order, from ``first_row`` on."""
    lead = len(index)
    body = tensor.shape[lead:]
    rows, _ = view2d(body)
    shape = (rows - first_row, *body[1:]) if body else ()
    size, tail = tensor.dtype.itemsize, prod(body[2:])
    pieces = []
    for chunk in tensor.chunks:
        spans = list(zip(chunk.offsets[:lead], chunk.sizes[:lead], index, strict=True))
        if any(not start <= i < start + length for start, length, i in spans):
            continue
        number = 0
        for start, length, i in spans:
            number = number * length + i - start
        height, width = view2d(chunk.sizes[lead:])
        top = chunk.offsets[lead] if body else 0
        left = chunk.offsets[lead + 1] * tail if len(body) > 1 else 0
        skip = max(first_row - top, 0)
        if skip >= height:
            continue
        offset = chunk.offset + (number * height + skip) * width * size
        row = max(top - first_row, 0)
        pieces.append(Piece(chunk.file, offset, row, left, height - skip, width, width * size))
    return Located(HfTensor(tensor.name, shape), tensor.dtype, tuple(pieces))


def nbytes(located: Located) -> int:
    """Bytes of a tensor's data."""
    return prod(located.tensor.shape) * located.dtype.itemsize


class Reader:
    """One thread's open files and buffers. Not to be shared; use it as a context manager."""

    def __init__(self, files: Sequence[StorageObject]) -> None:
        self._files = OpenObjects(files)
        self._block = bytearray()
        self._strip = bytearray()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def object(self, number: int) -> OpenObject:
        """Object ``number``, open; valid until the next call. DataError, StorageError as it says."""
        return self._files.get(number)

    def blocks(self, located: Located, window: int = WINDOW) -> Iterator[Block]:
        """The tensor in row-major order, ``window`` elements at most a block.

        Two tensors of one shape come in the same blocks, whatever their dtypes and files. Raises
        DataError where a file ends early, StorageError where it cannot be read.
        """
        rows, cols = view2d(located.tensor.shape)
        if not rows or not cols:
            return
        height, width = max(1, window // cols), min(cols, window)
        for row in range(0, rows, height):
            for col in range(0, cols, width):
                box = (row, col, min(height, rows - row), min(width, cols - col))
                yield Block(row, col, self._gather(located, box))

    def whole(self, located: Located) -> Bits:
        """All of a tensor as ``[rows, columns]``; for small ones."""
        rows, cols = view2d(located.tensor.shape)
        result = np.empty((rows, cols), _UNSIGNED[located.dtype.itemsize])
        for block in self.blocks(located):
            height, width = block.bits.shape
            result[block.row : block.row + height, block.col : block.col + width] = block.bits
        return result

    def raw(self, located: Located) -> Iterator[memoryview]:
        """The tensor's bytes in row-major order, as views valid until the next one."""
        for block in self.blocks(located):
            yield block.bits.reshape(-1).view(np.uint8).data

    def _gather(self, located: Located, box: tuple[int, int, int, int]) -> Bits:
        """Fill the window ``box`` (row, column, rows, columns) from the pieces that reach into it."""
        size = located.dtype.itemsize
        row, col, rows, cols = box
        if len(self._block) < rows * cols * size:
            self._block = bytearray(max(rows * cols, WINDOW) * size)
        bits: Bits = np.frombuffer(self._block, _UNSIGNED[size], rows * cols).reshape(rows, cols)
        if located.zeros:
            bits[:] = 0
            return bits
        filled = 0
        for piece in located.pieces:
            top, bottom = max(row, piece.row), min(row + rows, piece.row + piece.rows)
            left, right = max(col, piece.col), min(col + cols, piece.col + piece.cols)
            if top >= bottom or left >= right:
                continue
            offset = piece.offset + (top - piece.row) * piece.row_stride + (left - piece.col) * size
            into = bits[top - row : bottom - row, left - col : right - col]
            self._read(piece, offset, into)
            filled += into.size
        if filled != rows * cols:
            raise DataError(
                f"{filled} of {rows * cols} elements from row {row} on are in the files",
                where=located.tensor.name,
            )
        return bits

    def _read(self, piece: Piece, offset: int, into: Bits) -> None:
        """Read rows ``piece.row_stride`` bytes apart into a rectangle of a block."""
        rows, cols = into.shape
        size = into.itemsize
        run, stride = cols * size, piece.row_stride
        if (rows == 1 or stride == run) and into.flags.c_contiguous:
            self._files.get(piece.file).read_into(into.reshape(-1).view(np.uint8).data, offset)
        elif rows == 1 or stride <= WASTE * run:
            span = (rows - 1) * stride + run
            if len(self._strip) < span:
                self._strip = bytearray(span)
            self._files.get(piece.file).read_into(memoryview(self._strip)[:span], offset)
            strip: Bits = np.frombuffer(self._strip, np.uint8, span)
            apart = np.lib.stride_tricks.as_strided(strip, (rows, run), (stride, 1), writeable=False)
            into[:] = np.ascontiguousarray(apart).view(into.dtype)
        else:
            for i in range(rows):
                self._read(piece, offset + i * stride, into[i : i + 1])
