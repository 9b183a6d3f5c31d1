"""Proof of what a plan takes for granted: a dropped duplicate repeats its tensor, dropped padding is zero."""

from __future__ import annotations

from collections.abc import Callable

from glmconv.basics.errors import DataError
from glmconv.plan.plan import Plan
from glmconv.source.conditions import Blank, Condition, Equal
from glmconv.storage.opened import OpenObjects

WINDOW = 1 << 20


def check_conditions(plan: Plan) -> None:
    """Look at all conditions of a plan, as a run of it would. Raises DataError at the first that fails."""
    sources = OpenObjects(plan.sources)
    try:
        for condition in plan.conditions:
            check_condition(condition, sources, lambda: None)
    finally:
        sources.close()


def check_condition(condition: Condition, sources: OpenObjects, check_stop: Callable[[], None]) -> None:
    """Raise DataError unless the condition holds; StorageError where a source cannot be read."""
    if isinstance(condition, Equal):
        _check_equal(condition, sources, check_stop)
    else:
        _check_blank(condition, sources, check_stop)


def _check_equal(pair: Equal, sources: OpenObjects, check_stop: Callable[[], None]) -> None:
    """Name both tensors and the first differing byte."""
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
            there = sources.get(pair.right).object.address
            raise DataError(
                f"{pair.name} and {pair.other} should be equal, but byte {start + at} of {pair.size} differs",
                where=sources.get(pair.left).object.address,
                hint=f"the other copy is in {there}; one of the two is wrong",
            )


def _check_blank(blank: Blank, sources: OpenObjects, check_stop: Callable[[], None]) -> None:
    source = sources.get(blank.file)
    for number in range(blank.count):
        first = blank.offset + number * blank.stride
        for start in range(0, blank.run, WINDOW):
            check_stop()
            data = bytearray(min(WINDOW, blank.run - start))
            source.read_into(memoryview(data), first + start)
            if any(data):
                raise DataError(
                    f"{blank.name} has rows past the vocabulary that are not zero: they are no padding, "
                    "and dropping them would lose trained values",
                    where=source.object.address,
                    hint="set vocab_size in config.json to the number of rows that the model has",
                )
