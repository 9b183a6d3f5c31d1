"""Fills a window of a payload from interleaved or cast runs: large reads, then moves in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glmconv.basics.errors import DataError, GlmconvError
from glmconv.engine.rounding import CastOverflow, Rounding, tensor_overflow
from glmconv.engine.segments import Runs, clipped_runs
from glmconv.plan.plan import Move, Payload
from glmconv.storage.objects import OpenObject
from glmconv.storage.opened import OpenObjects

FAR_ROWS = 1 << 14
"""A gap between source rows above which reading each row alone costs less than reading the gap."""

CAST_BLOCK = 1 << 18
"""Source bytes of one step of a cast: its temporaries stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Runs of one move that go to ``view``, which begins at the first of them."""

    move: Move
    runs: Runs
    view: memoryview
    source: OpenObject

    @property
    def read_width(self) -> int:
        """Source bytes of one run."""
        cast, width = self.move.cast, self.runs.width
        return width if cast is None else width // cast[1].itemsize * cast[0].itemsize


class Blender:
    """Fills windows for one worker; ``scratch`` bounds how much of a source it holds.

    ``tally`` counts what casts lose, from when its user set it to zero.
    """

    def __init__(self, sources: OpenObjects, scratch: memoryview) -> None:
        self._sources = sources
        self._scratch = scratch
        self.tally = Rounding()

    def fill(self, view: memoryview, base: int, moves: Sequence[Move]) -> tuple[int, int]:
        """Fill ``view``, the payload's bytes from ``base`` on. Returns the bytes copied and the bytes cast.

        Bytes that no move covers become zero. Raises DataError when moves overlap, CastOverflow when a
        cast overflows (:meth:`overflow` then looks at the whole payload).
        """
        clipped = [(move, runs) for move in moves for runs in clipped_runs(move, base, base + len(view))]
        cast = sum(runs.width * runs.count for move, runs in clipped if move.cast is not None)
        copied = sum(runs.width * runs.count for move, runs in clipped if move.cast is None)
        if cast + copied > len(view):
            raise DataError(f"the plan is wrong: moves overlap between bytes {base} and {base + len(view)}")
        if cast + copied < len(view):
            view[:] = bytes(len(view))
        for move, runs in clipped:
            source = self._sources.get(move.src)
            try:
                self._place(_Part(move, runs, view[runs.dst - base :], source))
            except GlmconvError as error:
                error.where = error.where or source.object.address
                raise
        return copied, cast

    def overflow(self, payload: Payload, check_stop: Callable[[], None]) -> DataError:
        """The error of a payload in which a cast overflowed; reads all of it, to tell how much is lost."""
        from glmconv.engine.grids import cast_bytes  # numpy, only when needed

        blocks: list[CastOverflow] = []
        path = ""
        for move, cast in ((move, move.cast) for move in payload.moves if move.cast is not None):
            source = self._sources.get(move.src)
            for row, start in ((r, s) for r in range(move.count) for s in range(0, move.run, CAST_BLOCK)):
                check_stop()
                read = self._scratch[: min(CAST_BLOCK, move.run - start)]
                source.read_into(read, move.src_offset + row * move.src_stride + start)
                try:
                    cast_bytes(read, cast, Rounding())
                except CastOverflow as error:
                    blocks.append(error)
                    path = path or source.object.address
        return tensor_overflow(payload, blocks, path)

    def _place(self, part: _Part) -> None:
        """Place runs by the largest reads that fit the scratch space."""
        width, stride, count = part.read_width, part.move.src_stride, part.runs.count
        near = 0 <= stride <= width + FAR_ROWS and width <= CAST_BLOCK
        if count == 1 or not near:
            for row in range(count):
                self._place_row(part, row)
            return
        limit = CAST_BLOCK if part.move.cast else len(self._scratch)
        step = (limit - width) // stride + 1 if stride else count
        for first in range(0, count, step):
            self._place_rows(part, first, min(step, count - first))

    def _place_row(self, part: _Part, row: int) -> None:
        """One run: straight into the view, or in blocks through a cast."""
        at, offset = row * part.move.dst_stride, part.runs.src + row * part.move.src_stride
        cast = part.move.cast
        if cast is None:
            part.source.read_into(part.view[at : at + part.runs.width], offset)
            return
        from glmconv.engine.grids import cast_bytes  # numpy, only when needed

        for start in range(0, part.read_width, CAST_BLOCK):
            read = self._scratch[: min(CAST_BLOCK, part.read_width - start)]
            part.source.read_into(read, offset + start)
            out = cast_bytes(read, cast, self.tally)
            part.view[at : at + len(out)] = out
            at += len(out)

    def _place_rows(self, part: _Part, first: int, rows: int) -> None:
        """Rows from one read, scattered (and cast) in memory."""
        from glmconv.engine.grids import cast_bytes, dense_rows, scatter  # numpy, as above

        width, stride, cast = part.read_width, part.move.src_stride, part.move.cast
        read = self._scratch[: (rows - 1) * stride + width]
        part.source.read_into(read, part.runs.src + first * stride)
        view, shape = part.view[first * part.move.dst_stride :], (rows, part.runs.width)
        if cast is not None:
            read = cast_bytes(dense_rows(read, rows, width, stride), cast, self.tally)
            stride = part.runs.width
        scatter(read, stride, view, part.move.dst_stride, shape)
