"""What casts lose: values that a narrower type can only call zero or subnormal (or infinite: refused).

Counts belong to the slots of target files (``slots``), as digests do: a slot that is done again, by
whatever worker or run, gives the same count, and is counted once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.engine.slots import TargetSlots
from glmconv.plan.plan import Payload

SlotCount = tuple[int, int, int]
"""Slot of a target file, values that became zero, values that became subnormal."""

SHOWN = 10
"""Tensors that a report names; the totals are of all."""

OVERFLOW_HINT = "choose a dtype with a wider range (bf16 or f32), or check the source's values"


@dataclass(slots=True)
class Rounding:
    """Values that were not zero and became zero, or that became subnormal, in a cast to fewer bits."""

    to_zero: int = 0
    to_subnormal: int = 0


class CastOverflow(DataError):
    """Finite values of one block that the target type can only call infinite."""

    def __init__(self, count: int, largest: float, source: DType, target: DType) -> None:
        what = (
            f"{count:,} {'value does' if count == 1 else 'values do'} not fit {target.label}: the cast from "
        )
        what += f"{source.label} would make them infinite; the largest magnitude is {largest!r}"
        super().__init__(what, hint=OVERFLOW_HINT)
        self.count, self.largest, self.source, self.target = count, largest, source, target


def tensor_overflow(payload: Payload, blocks: Sequence[CastOverflow], path: str) -> DataError:
    """The error of a whole payload, from those of its blocks. ``path`` is a source that holds one."""
    count, largest = sum(block.count for block in blocks), max(block.largest for block in blocks)
    whole = CastOverflow(count, largest, blocks[0].source, blocks[0].target)
    return DataError(
        f"{whole.what} (of {payload.size // whole.target.itemsize:,} values, from {path})",
        where=payload.name + (f" at {list(payload.place)}" if any(payload.place) else ""),
        hint=whole.hint,
    )


class RoundingCounts:
    """Counts of a run by slot, so that a slot counts once however often it is done."""

    def __init__(self, targets: Sequence[TargetSlots]) -> None:
        self._targets = targets
        self._counts = [array("I", bytes(8 * slots.count)) for slots in targets]  # two numbers a slot

    def take(self, target: int, counts: Sequence[SlotCount]) -> None:
        for slot, to_zero, to_subnormal in counts:
            self._counts[target][2 * slot], self._counts[target][2 * slot + 1] = to_zero, to_subnormal

    def by_tensor(self) -> dict[str, Rounding]:
        """Counts by stored name, of tensors that lost something."""
        found: dict[str, Rounding] = {}
        for slots, counts in zip(self._targets, self._counts, strict=True):
            for payload, (first, end) in zip(slots.target.payloads, pairwise(slots.first), strict=True):
                own = counts[2 * first : 2 * end]
                to_zero, to_subnormal = sum(own[::2]), sum(own[1::2])
                if to_zero or to_subnormal:
                    one = found.setdefault(payload.name, Rounding())
                    one.to_zero += to_zero
                    one.to_subnormal += to_subnormal
        return found


def summary(by_tensor: dict[str, Rounding]) -> dict[str, Any]:
    """Totals, and the tensors that lost most, as plain data."""
    worst = sorted(
        by_tensor, key=lambda name: (-by_tensor[name].to_zero, -by_tensor[name].to_subnormal, name)
    )
    return {
        "tensors": len(by_tensor),
        "to_zero": sum(one.to_zero for one in by_tensor.values()),
        "to_subnormal": sum(one.to_subnormal for one in by_tensor.values()),
        "most": [
            {"name": name, "to_zero": by_tensor[name].to_zero, "to_subnormal": by_tensor[name].to_subnormal}
            for name in worst[:SHOWN]
        ],
    }
