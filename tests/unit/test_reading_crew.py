"""A crew of threads gives the results in order, counts bytes and stops at the first error."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest

from glmconv.basics.threads import Meter, Step, work_through


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    found = work_through(range(50), lambda: nullcontext(10), lambda state, item: state * item, workers)
    assert found == [10 * i for i in range(50)]


def test_each_thread_has_its_own_state() -> None:
    barrier = threading.Barrier(3, timeout=10)
    states: list[object] = []

    def enter() -> nullcontext[object]:
        states.append(object())
        return nullcontext(states[-1])

    def work(state: object, item: int) -> object:
        barrier.wait()
        return state

    assert len(set(map(id, work_through(range(3), enter, work, 3)))) == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_stops_all(workers: int) -> None:
    done: list[int] = []

    def work(state: None, item: int) -> None:
        if item == workers:
            raise ValueError("the item")
        time.sleep(0.001)
        done.append(item)

    with pytest.raises(ValueError, match="the item"):
        work_through(range(2_000), nullcontext, work, workers)
    assert len(done) < 100


def test_no_items_no_work() -> None:
    assert work_through([], nullcontext, lambda state, item: item, 2) == []


def test_the_meter_counts_bytes_of_all_threads() -> None:
    steps: list[Step] = []
    meter = Meter(1000, steps.append)
    work_through(range(100), nullcontext, lambda state, item: meter.add(10), 4)
    assert meter.done == 1000
    assert steps[-1] == Step(1000, 1000)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
