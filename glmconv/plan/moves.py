"""From tiles to moves: where the bytes of a stored part come from."""

from __future__ import annotations

from collections.abc import Mapping

from glmconv.basics.dtypes import DType
from glmconv.plan.plan import Move
from glmconv.source.locate import Located, Piece
from glmconv.tables.expand import Box, Part, view2d


def part_moves(
    part: Part, rows: tuple[int, int], located: Mapping[str, Located], dtype: DType
) -> tuple[Move, ...]:
    """Moves that fill rows ``rows`` (start, stop) of a part's 2-D view, sorted by target offset.

    ``dtype`` is the stored tensor's; a source of another dtype is cast. Offsets count from the
    first byte of that row range.
    """
    _, cols = view2d(part.shape)
    moves: list[Move] = []
    for tensor, boxes in part.slots:
        source = located[tensor.name]
        cast = None if source.dtype is dtype else (source.dtype, dtype)
        for box in boxes:
            top, bottom = max(box.part_row, rows[0]), min(box.part_row + box.rows, rows[1])
            if top >= bottom:
                continue
            kept = box
            if bottom - top != box.rows:
                skip = top - box.part_row
                kept = Box(box.row + skip, box.col, bottom - top, box.cols, top, box.part_col)
            for piece in source.pieces:
                move = _move(kept, piece, rows[0], cols, source.dtype.itemsize, dtype.itemsize, cast)
                if move is not None:
                    moves.append(move)
    if len(moves) > 1:
        moves.sort(key=lambda move: move.dst_offset)
    return coalesce(moves)


def _move(
    box: Box, piece: Piece, first_row: int, cols: int, size: int, out: int, cast: tuple[DType, DType] | None
) -> Move | None:
    """The move of the overlap of a box (where it lies in the part) and a piece (in the source)."""
    top, bottom = max(box.row, piece.row), min(box.row + box.rows, piece.row + piece.rows)
    left, right = max(box.col, piece.col), min(box.col + box.cols, piece.col + piece.cols)
    if top >= bottom or left >= right:
        return None
    count, width = bottom - top, right - left
    src = piece.offset + (top - piece.row) * piece.row_stride + (left - piece.col) * size
    row = box.part_row + top - box.row - first_row
    dst = (row * cols + box.part_col + left - box.col) * out
    if count == 1 or (piece.row_stride == width * size and cols == width):
        return Move(piece.file, src, dst, count * width * size, cast=cast)
    return Move(piece.file, src, dst, width * size, count, piece.row_stride, cols * out, cast)


def coalesce(moves: list[Move]) -> tuple[Move, ...]:
    """Join neighbours that continue each other on both sides."""
    joined: list[Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.count == move.count == 1
            and last.src == move.src
            and last.cast == move.cast
            and last.src_offset + last.run == move.src_offset
            and last.dst_offset + last.dst_run == move.dst_offset
        ):
            joined[-1] = Move(last.src, last.src_offset, last.dst_offset, last.run + move.run, cast=last.cast)
        else:
            joined.append(move)
    return tuple(joined)
