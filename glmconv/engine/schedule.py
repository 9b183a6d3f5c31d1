"""Who does what next: one worker a target file while there are enough files, then shared ones."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from glmconv.engine.slots import TargetSlots


@dataclass(slots=True)
class Stretch:
    """Unfinished slots ``first`` to ``end`` of one target file, taken from the front."""

    slots: TargetSlots
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.slots.start(self.end) - self.slots.start(self.first)


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does between two looks at the schedule."""

    slots: TargetSlots
    first: int
    end: int


def unfinished(slots: TargetSlots, finished: Sequence[tuple[int, int]]) -> list[Stretch]:
    """What is left of a target file beside ``finished`` slot ranges (they may overlap)."""
    stretches = []
    at = 0
    for first, end in [*sorted(finished), (slots.count, slots.count)]:
        if first > at:
            stretches.append(Stretch(slots, at, first))
        at = max(at, end)
    return stretches


class Schedule:
    """Hands out jobs of about ``job_bytes``. A stretch has one owner, so a file has one writer.

    Only when no stretch is left without an owner is the longest one split.
    """

    def __init__(self, stretches: Sequence[Stretch], job_bytes: int) -> None:
        self._waiting: dict[int, list[Stretch]] = {}
        for stretch in stretches:
            self._waiting.setdefault(stretch.slots.index, []).append(stretch)
        self._owned: dict[int, Stretch] = {}
        self._job_bytes = job_bytes
        self._lock = threading.Lock()

    def next(self, worker: int) -> Job | None:
        """The next job of ``worker``; None when all work is done or with others."""
        with self._lock:
            stretch = self._owned.get(worker)
            if stretch is None or stretch.first == stretch.end:
                stretch = self._claim(worker)
                if stretch is None:
                    return None
            first = stretch.first
            stretch.first = stretch.slots.job_end(first, stretch.end, self._job_bytes)
            return Job(stretch.slots, first, stretch.first)

    def _claim(self, worker: int) -> Stretch | None:
        before = self._owned.pop(worker, None)
        busy = {stretch.slots.index for stretch in self._owned.values()}
        if before is not None and before.slots.index in self._waiting:
            index: int | None = before.slots.index
        else:
            index = next((i for i in self._waiting if i not in busy), next(iter(self._waiting), None))
        if index is not None:
            waiting = self._waiting[index]
            stretch = waiting.pop(0)
            if not waiting:
                del self._waiting[index]
        else:
            split = self._split_longest()
            if split is None:
                return None
            stretch = split
        self._owned[worker] = stretch
        return stretch

    def _split_longest(self) -> Stretch | None:
        """The second half of the longest stretch, at a payload's start where one is near the middle."""
        longest = max(self._owned.values(), key=lambda stretch: stretch.size, default=None)
        if longest is None or longest.end - longest.first < 2 or longest.size <= self._job_bytes:
            return None
        slots = longest.slots
        middle = (slots.start(longest.first) + slots.start(longest.end)) // 2
        cut = bisect_left(range(slots.count + 1), middle, longest.first + 1, longest.end - 1, key=slots.start)
        payload = slots.first[slots.payload_at(cut)]
        if payload > longest.first and slots.start(cut) - slots.start(payload) <= self._job_bytes:
            cut = payload
        stolen = Stretch(slots, cut, longest.end)
        longest.end = cut
        return stolen
