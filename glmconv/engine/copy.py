"""The one copy primitive: fills a part of a target file, in the order of the target's bytes.

Each range goes down the rungs: share the extents, let the kernel copy, read and write through a
window of memory. Bytes are hashed as they pass. Neighbouring small pieces are written together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from glmconv.engine.ahead import EdgesAhead
from glmconv.engine.blend import Blender
from glmconv.engine.clone import MIN_CLONE, Sharing, block_size, extents
from glmconv.engine.files import OpenTarget, write_all
from glmconv.engine.hashes import LeafHasher
from glmconv.engine.rounding import CastOverflow, Rounding, SlotCount
from glmconv.engine.segments import Segment, segments
from glmconv.engine.slots import TargetSlots
from glmconv.plan.plan import HASH_LEAF, Payload
from glmconv.storage.objects import OpenObject
from glmconv.storage.opened import OpenObjects

WINDOW = 1 << 20
"""Bytes of memory that one worker moves at a time (a second window is scratch for strided reads)."""

PAGE = 4096
SMALL_GAP = 1 << 14
"""Gaps up to this are written as zeros with their neighbours; larger ones stay holes."""

OFFLOAD_STEP = 16 << 20
"""Bytes that the kernel is asked to copy at a time, so that a stop is seen soon."""


@dataclass(slots=True)
class Counters:
    """Bytes of payloads by the way they came; ``literal`` counts what lies between payloads.

    ``reread`` are bytes read, in ``reread_seconds``, for their hash alone.
    """

    cloned: int = 0
    copied: int = 0
    computed: int = 0
    zero: int = 0
    literal: int = 0
    reread: int = 0
    reread_seconds: float = 0.0

    @property
    def payload(self) -> int:
        return self.cloned + self.copied + self.computed + self.zero


class StopCheck(Protocol):
    """Raises when the work is to end early."""

    def __call__(self) -> None: ...


class Window:
    """Bytes on their way to one target file: gathered while they are neighbours, then written."""

    def __init__(self, size: int) -> None:
        self._view = memoryview(bytearray(size))
        self._base = 0
        self._fill = 0
        self._limit = size
        self._target = OpenTarget(-1, "")

    def open(self, target: OpenTarget) -> None:
        """Turn to another file; what an abandoned job left is forgotten."""
        self._target, self._fill = target, 0

    def room(self, at: int, want: int) -> memoryview:
        """A view of up to ``want`` bytes (at least one) for file offset ``at``.

        The caller fills it from its start and tells :meth:`advance` how far.
        """
        gap = at - self._base - self._fill
        if self._fill and 0 < gap <= SMALL_GAP and self._fill + gap < self._limit:
            self._view[self._fill : self._fill + gap] = bytes(gap)
            self._fill += gap
        elif gap or self._fill == self._limit:
            self.flush()
        if not self._fill:
            # Windows end on pages: the next write then fills whole pages.
            self._base, self._limit = at, len(self._view) - at % PAGE
        return self._view[self._fill : min(self._fill + want, self._limit)]

    def advance(self, size: int) -> None:
        self._fill += size

    def flush(self) -> None:
        """Write what was gathered. StorageError on failure."""
        size, self._fill = self._fill, 0
        if size:
            write_all(self._target, self._view[:size], self._base)


class Copier:
    """Executes jobs for one worker."""

    def __init__(self, sources: OpenObjects, sharing: Sharing, hashing: bool, check_stop: StopCheck) -> None:
        self.counters = Counters()
        self._sources = sources
        self._sharing = sharing
        self._hashing = hashing
        self._check_stop = check_stop
        self._window = Window(WINDOW)
        self._scratch = memoryview(bytearray(WINDOW))
        self._blender = Blender(sources, self._scratch)
        self._ahead = None if hashing or sharing.mode == "copy" else EdgesAhead(sources, sharing)
        self._hasher: LeafHasher | None = None
        self._rounded: list[SlotCount] = []
        self._target = OpenTarget(-1, "")
        self._block = PAGE

    def run(
        self, slots: TargetSlots, first: int, end: int, target: OpenTarget
    ) -> tuple[bytes, tuple[SlotCount, ...]]:
        """Write slots ``first`` to ``end`` into ``target``; return their leaf digests and what casts lost.

        Without hashing there are no digests. All bytes are written (not yet flushed to the device) when it
        returns. Raises DataError where a cast overflows, with what the whole payload holds.
        """
        if target is not self._target:
            self._target, self._block = target, block_size(target.fd)
        self._window.open(target)
        if self._ahead:
            self._ahead.ask(slots, first)
        self._hasher = LeafHasher() if self._hashing else None
        self._rounded = []
        literals = slots.literals(slots.start(first), slots.start(end))
        pending = 0
        for index, start, stop in slots.pieces(first, end):
            payload = slots.target.payloads[index]
            while pending < len(literals) and literals[pending][0] < payload.offset + stop:
                self._literal(*literals[pending])
                pending += 1
            self._payload(payload, start, stop, slots.first[index])
        for offset, data in literals[pending:]:
            self._literal(offset, data)
        self._window.flush()
        return self._hasher.digests() if self._hasher else b"", tuple(self._rounded)

    def _literal(self, at: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            view = self._window.room(at, len(left))
            view[:] = left[: len(view)]
            self._window.advance(len(view))
            at += len(view)
            left = left[len(view) :]
        self.counters.literal += len(data)

    def _payload(self, payload: Payload, start: int, stop: int, slot: int) -> None:
        """Bytes ``start`` to ``stop`` of the payload whose first slot is ``slot``."""
        for segment in segments(payload, start, stop):
            self._check_stop()
            at = payload.offset + segment.start
            if segment.moves:
                self._blend(payload, segment, slot)
            elif segment.src < 0:
                self._zeros(at, segment.end - segment.start)
            else:
                self._straight(at, segment.src, segment.src_offset, segment.end - segment.start)
        if self._hasher and stop == payload.size:
            self._hasher.end_payload()

    def _blend(self, payload: Payload, segment: Segment, slot: int) -> None:
        """Interleaved or cast runs: windows end at multiples of eight bytes, so that no element is cut.

        No window reaches over a slot's end, so that what casts lose is counted slot by slot.
        """
        at = segment.start
        while at < segment.end:
            self._check_stop()
            end = min(segment.end, (at // HASH_LEAF + 1) * HASH_LEAF)
            view = self._window.room(payload.offset + at, end - at)
            if at + len(view) < end:
                view = view[: max(0, len(view) - (at + len(view)) % 8)]
            if not view:
                self._window.flush()
                continue
            try:
                copied, cast = self._blender.fill(view, at, segment.moves)
            except CastOverflow as error:
                raise self._blender.overflow(payload, self._check_stop) from error
            self._count(slot + at // HASH_LEAF)
            if self._hasher:
                self._hasher.update(view)
            self._window.advance(len(view))
            self.counters.copied += copied
            self.counters.computed += cast
            self.counters.zero += len(view) - copied - cast
            at += len(view)

    def _count(self, slot: int) -> None:
        """Add what casts lost since the last call to a slot."""
        lost, self._blender.tally = self._blender.tally, Rounding()
        if not (lost.to_zero or lost.to_subnormal):
            return
        if self._rounded and self._rounded[-1][0] == slot:
            _, to_zero, to_subnormal = self._rounded.pop()
            lost.to_zero += to_zero
            lost.to_subnormal += to_subnormal
        self._rounded.append((slot, lost.to_zero, lost.to_subnormal))

    def _zeros(self, at: int, size: int) -> None:
        """Zeros of a new file need no writing; the window writes small ones with their neighbours."""
        if self._hasher:
            self._hasher.zeros(size)
        self.counters.zero += size

    def _straight(self, at: int, src: int, src_offset: int, size: int) -> None:
        """One contiguous range, down the rungs."""
        source = self._sources.get(src)
        congruent = (src_offset - at) % self._block == 0
        head = -at % self._block
        middle = (size - head) // self._block * self._block
        if congruent and middle >= MIN_CLONE and self._sharing.may_clone(source.device):
            self._spread(source, src_offset, at, head)
            self._window.flush()  # what goes by another way must not look like a gap to fill
            if self._sharing.clone(source, src_offset + head, self._target, at + head, middle):
                self._hash_source(source, src_offset + head, middle)
                self.counters.cloned += middle
            else:
                self._spread(source, src_offset + head, at + head, middle)
            done = head + middle
            self._spread(source, src_offset + done, at + done, size - done)
        else:
            self._spread(source, src_offset, at, size)

    def _spread(self, source: OpenObject, src_offset: int, at: int, size: int) -> None:
        """Copy a range; holes of the source stay holes."""
        for is_hole, offset, length in extents(source, src_offset, size):
            there = at + offset - src_offset
            if is_hole:
                self._zeros(there, length)
            elif length >= WINDOW and self._sharing.may_offload(source):
                self._offload(source, offset, there, length)
            else:
                self._through(source, offset, there, length)

    def _offload(self, source: OpenObject, src_offset: int, at: int, size: int) -> None:
        """Let the kernel copy; the rest of a range that it refuses is read and written."""
        self._window.flush()
        done = 0
        while done < size:
            self._check_stop()
            step = min(size - done, OFFLOAD_STEP)
            got = self._sharing.offload(source, src_offset + done, self._target, at + done, step)
            if not got:
                break
            done += got
            self.counters.copied += got
        self._hash_source(source, src_offset, done)
        self._through(source, src_offset + done, at + done, size - done)

    def _through(self, source: OpenObject, src_offset: int, at: int, size: int) -> None:
        """Read into the window, hash, write when it is full."""
        done = 0
        while done < size:
            self._check_stop()
            view = self._window.room(at + done, size - done)
            source.read_into(view, src_offset + done)
            if self._hasher:
                self._hasher.update(view)
            self._window.advance(len(view))
            done += len(view)
            self.counters.copied += len(view)

    def _hash_source(self, source: OpenObject, src_offset: int, size: int) -> None:
        """Hash bytes that did not pass through the window, reading them once from the source."""
        if self._hasher is None or not size:
            return
        began = time.monotonic()
        for is_hole, offset, length in extents(source, src_offset, size):
            if is_hole:
                self._hasher.zeros(length)
                continue
            for start in range(0, length, WINDOW):
                self._check_stop()
                view = self._scratch[: min(WINDOW, length - start)]
                source.read_into(view, offset + start)
                self._hasher.update(view)
                self.counters.reread += len(view)
        self.counters.reread_seconds += time.monotonic() - began
