"""Slots: the unit in which progress is counted, journalled and split between workers.

The slots of a target file are the hash leaves of its payloads, in order, and one more: the tail
behind the last payload. A slot begins where the one before it ends, so literals and padding
before a payload belong to the payload's first slot. Slots depend on the plan alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from glmconv.basics.errors import DataError
from glmconv.plan.plan import HASH_LEAF, Plan, TargetFile


def target_slots(plan: Plan) -> list[TargetSlots]:
    """The slots of every target. DataError when a target's path leaves the unit or comes twice."""
    seen: set[str] = set()
    for target in plan.targets:
        parts = PurePosixPath(target.path).parts
        if not parts or parts[0] == "/" or ".." in parts or target.path in seen:
            raise DataError("the plan is wrong: not a path of its own inside the output", where=target.path)
        seen.add(target.path)
    return [TargetSlots(index, target) for index, target in enumerate(plan.targets)]


class TargetSlots:
    """The slots of one target file.

    ``index`` counts targets in the plan. ``first[p]`` is the first slot of payload ``p``,
    ``first[len(payloads)]`` the tail's; ``count`` includes the tail.
    """

    __slots__ = ("count", "first", "index", "literal_offsets", "target")

    def __init__(self, index: int, target: TargetFile) -> None:
        self.index = index
        self.target = target
        self.first = [0]
        for payload in target.payloads:
            self.first.append(self.first[-1] + -(-payload.size // HASH_LEAF))
        self.count = self.first[-1] + 1
        self.literal_offsets = [offset for offset, _ in target.literals]
        self._check_layout()

    def _check_layout(self) -> None:
        """Raise DataError unless payloads and literals lie in order, apart, inside the file."""
        target = self.target
        payload_offsets = [payload.offset for payload in target.payloads]
        pieces = [(p.offset, p.offset + p.size, p.name) for p in target.payloads]
        pieces += [(offset, offset + len(data), "a literal") for offset, data in target.literals]
        defects = [
            f"{name} and {other} overlap at byte {start}"
            for (_, end, name), (start, _, other) in pairwise(sorted(pieces))
            if start < end
        ]
        if any(start < 0 or end > target.size for start, end, _ in pieces):
            defects.append("bytes lie outside of the file")
        if any(a > b for offsets in (payload_offsets, self.literal_offsets) for a, b in pairwise(offsets)):
            defects.append("payloads or literals are not in the order of offsets")
        if defects:
            raise DataError(f"the plan is wrong: {defects[0]}", where=target.path)

    def payload_at(self, slot: int) -> int:
        """Index of the payload that owns ``slot`` (the number of payloads for the tail)."""
        return bisect_right(self.first, slot) - 1

    def start(self, slot: int) -> int:
        """File offset where ``slot`` begins: the end of the slot before it."""
        if slot == 0:
            return 0
        if slot == self.count:
            return self.target.size
        payload = self.target.payloads[self.payload_at(slot - 1)]
        inside = (slot - self.first[self.payload_at(slot - 1)]) * HASH_LEAF
        return payload.offset + min(inside, payload.size)

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Payload parts in slots ``first`` to ``end``: (payload index, start, end inside the payload)."""
        end = min(end, self.count - 1)
        while first < end:
            index = self.payload_at(first)
            size = self.target.payloads[index].size
            stop = min(end, self.first[index + 1])
            base = self.first[index]
            yield index, (first - base) * HASH_LEAF, min((stop - base) * HASH_LEAF, size)
            first = stop

    def payload_bytes(self, first: int, end: int) -> int:
        """Payload bytes in slots ``first`` to ``end``."""
        return sum(stop - start for _, start, stop in self.pieces(first, end))

    def leaf_count(self, first: int, end: int) -> int:
        """Leaves (digests) in slots ``first`` to ``end``: all but the tail."""
        return min(end, self.count - 1) - min(first, self.count - 1)

    def literals(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """Literals that begin in the file range ``start`` to ``end``."""
        left = bisect_left(self.literal_offsets, start)
        return self.target.literals[left : bisect_left(self.literal_offsets, end)]

    def job_end(self, first: int, end: int, size: int) -> int:
        """End of a job that begins at slot ``first``: about ``size`` bytes, whole payloads if they are small.

        A payload is not cut when it fits a job, so that a clone of it stays one clone.
        """
        limit = self.start(first) + size
        index = self.payload_at(first)
        stop = self.first[index + 1] if index + 1 < len(self.first) else self.count
        if stop >= end or self.start(stop) > limit:
            return min(end, stop, max(first + 1, first + size // HASH_LEAF))
        while stop < end:
            index = self.payload_at(stop)
            following = self.first[index + 1] if index + 1 < len(self.first) else self.count
            if following > end or self.start(following) > limit:
                break
            stop = following
        return stop
