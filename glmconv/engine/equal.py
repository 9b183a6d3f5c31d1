"""Proof that a dropped duplicate is one: two source ranges hold the same bytes."""

from __future__ import annotations

from glmconv.engine.copy import StopCheck
from glmconv.engine.files import Sources
from glmconv.errors import DataError
from glmconv.plan import Equal

WINDOW = 1 << 20


def check_equal(pair: Equal, sources: Sources, check_stop: StopCheck) -> None:
    """Raise DataError that names both tensors and the first differing byte, unless the ranges are equal."""
    # Whole bytearrays compare at the speed of memory; views compare element by element.
    left, right = bytearray(min(WINDOW, pair.size)), bytearray(min(WINDOW, pair.size))
    for start in range(0, pair.size, WINDOW):
        check_stop()
        size = min(WINDOW, pair.size - start)
        if size < len(left):
            left, right = bytearray(size), bytearray(size)
        sources.get(pair.left).read_into(memoryview(left), pair.left_offset + start)
        sources.get(pair.right).read_into(memoryview(right), pair.right_offset + start)
        if left != right:
            at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
            raise DataError(
                f"{pair.name} and {pair.other} should be equal, but byte {start + at} of {pair.size} differs",
                where=sources.get(pair.left).source.path,
                hint=f"the other copy is in {sources.get(pair.right).source.path}; one of the two is wrong",
            )
