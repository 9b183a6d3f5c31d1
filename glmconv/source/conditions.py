"""What a source takes for granted of its own bytes, and what of it the output does not hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equal:
    """Two source ranges of ``size`` bytes that must hold the same bytes (a dropped duplicate)."""

    name: str
    other: str
    left: int
    left_offset: int
    right: int
    right_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Blank:
    """``count`` runs of ``run`` source bytes that must be zero: what is dropped as padding is looked at."""

    name: str
    file: int
    offset: int
    run: int
    count: int = 1
    stride: int = 0

    @property
    def size(self) -> int:
        return self.run * self.count


Condition = Equal | Blank
"""What must hold of the sources' bytes for the output to be right; looked at while a plan is carried out."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor that the output does not hold, and why."""

    name: str
    reason: str
    size: int
