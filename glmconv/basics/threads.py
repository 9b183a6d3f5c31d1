"""A few threads that work through a list, each with files of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
State = TypeVar("State")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Step:
    """How far a long piece of work is, in bytes."""

    done: int
    total: int


OnStep = Callable[[Step], None]
"""Called from any thread, never from two at once."""


class Meter:
    """Counts bytes of all threads and tells ``progress``."""

    def __init__(self, total: int, progress: OnStep | None = None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with self._lock:
            self.done += count
            if self._progress is not None:
                self._progress(Step(self.done, self.total))


def work_through(
    items: Sequence[Item],
    enter: Callable[[], AbstractContextManager[State]],
    work: Callable[[State, Item], Result],
    workers: int,
) -> list[Result]:
    """``work`` of every item, in order of ``items``; each thread enters a state of its own first.

    numpy, xxhash and reads release the interpreter lock, so threads share the work. The first error
    stops all threads after their present item and is raised.
    """
    numbers, lock, stop = iter(range(len(items))), threading.Lock(), threading.Event()
    results: dict[int, Result] = {}

    def take_turns() -> None:
        with enter() as state:
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    results[number] = work(state, items[number])
                except BaseException:
                    stop.set()
                    raise

    if workers <= 1 or len(items) <= 1:
        take_turns()
        return [results[number] for number in range(len(items))]
    with ThreadPoolExecutor(min(workers, len(items))) as pool:
        try:
            for future in [pool.submit(take_turns) for _ in range(min(workers, len(items)))]:
                future.result()
        except BaseException:
            stop.set()
            raise
    return [results[number] for number in range(len(items))]
