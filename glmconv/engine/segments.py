"""A part of a payload as segments: straight copies, zeros, and blends of interleaved runs.

Long runs become straight copies (they can be cloned, or copied by the kernel). Short strided runs
and casts stay together as a blend, which a window of memory is filled from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glmconv.basics.errors import DataError
from glmconv.plan.plan import Move, Payload

LONG_RUN = 1 << 16
"""Runs of this many bytes are copied one by one; shorter ones are gathered in memory."""

FAR_APART = 1 << 20
"""Runs this far apart in the payload share no window of memory: they too are copied one by one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``start`` to ``end`` of a payload.

    A straight copy names ``src`` and ``src_offset``; a blend names its ``moves``; zeros name neither.
    """

    start: int
    end: int
    src: int = -1
    src_offset: int = 0
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Runs:
    """``count`` equal runs of ``width`` target bytes, clipped from one move to a payload range.

    ``dst`` and ``src`` are the first run's offsets (in the payload, in the source file).
    """

    src: int
    dst: int
    width: int
    count: int


def normalized(move: Move) -> Move:
    """``move`` with runs that touch on both sides joined into one."""
    if move.count > 1 and move.src_stride == move.run and move.dst_stride == move.dst_run:
        return Move(move.src, move.src_offset, move.dst_offset, move.run * move.count, cast=move.cast)
    return move


def span_end(move: Move) -> int:
    """Payload offset behind the last run."""
    return move.dst_offset + (move.count - 1) * move.dst_stride + move.dst_run


def _source_offset(move: Move, run: int, inside: int) -> int:
    """Source offset of target byte ``inside`` of run number ``run``."""
    if move.cast is not None:
        inside = inside // move.cast[1].itemsize * move.cast[0].itemsize
    return move.src_offset + run * move.src_stride + inside


def clipped_runs(move: Move, start: int, end: int) -> Iterator[Runs]:
    """A move's runs inside payload range ``start`` to ``end``: a cut head, whole runs, a cut tail."""
    width = move.dst_run
    stride = move.dst_stride if move.count > 1 else max(width, 1)
    first = max(0, (start - move.dst_offset) // stride)
    last = min(move.count, -(-(end - move.dst_offset) // stride))
    if first < last:
        low = max(0, start - move.dst_offset - first * stride)
        high = min(width, end - move.dst_offset - first * stride)
        if low or high < width:
            if low < high:
                at = move.dst_offset + first * stride + low
                yield Runs(_source_offset(move, first, low), at, high - low, 1)
            first += 1
    if first < last:
        high = min(width, end - move.dst_offset - (last - 1) * stride)
        whole = last - first - (high < width)
        if whole:
            yield Runs(_source_offset(move, first, 0), move.dst_offset + first * stride, width, whole)
        if high < width:
            at = move.dst_offset + (last - 1) * stride
            yield Runs(_source_offset(move, last - 1, 0), at, high, 1)


def _pieces(move: Move, start: int, end: int) -> Iterator[Segment]:
    """A move inside ``start`` to ``end``: straight copies for long runs, else one blend piece."""
    alone = move.count == 1 or move.run >= LONG_RUN or move.dst_stride >= FAR_APART
    if move.cast is None and alone:
        for runs in clipped_runs(move, start, end):
            for index in range(runs.count):
                at = runs.dst + index * move.dst_stride
                yield Segment(at, at + runs.width, move.src, runs.src + index * move.src_stride, (move,))
        return
    low, high = max(start, move.dst_offset), min(end, span_end(move))
    if low < high:
        yield Segment(low, high, moves=(move,))


def segments(payload: Payload, start: int, end: int) -> Iterator[Segment]:
    """Segments that cover bytes ``start`` to ``end`` of a payload, in order and without a gap.

    Raises DataError when straight copies overlap: the plan is wrong then.
    """
    touched = (move for move in payload.moves if move.dst_offset < end and span_end(move) > start)
    pieces = [piece for move in touched for piece in _pieces(normalized(move), start, end)]
    pieces.sort(key=lambda piece: piece.start)
    at = start
    index = 0
    while index < len(pieces):
        group = [pieces[index]]
        reach = pieces[index].end
        index += 1
        while index < len(pieces) and pieces[index].start < reach:
            group.append(pieces[index])
            reach = max(reach, pieces[index].end)
            index += 1
        low = group[0].start
        if low > at:
            yield Segment(at, low)
        at = reach
        yield _merged(payload, group, low, reach)
    if at < end:
        yield Segment(at, end)


def _merged(payload: Payload, group: list[Segment], start: int, end: int) -> Segment:
    if len(group) > 1 and all(piece.src >= 0 for piece in group):
        raise DataError(f"the plan is wrong: moves of {payload.name} overlap at byte {group[1].start}")
    if len(group) == 1 and group[0].src >= 0:
        return Segment(start, end, group[0].src, group[0].src_offset)
    unique = {id(piece.moves[0]): piece.moves[0] for piece in group}
    return Segment(start, end, moves=tuple(unique.values()))
