"""Slots and jobs: every byte of a target belongs to one slot, every slot is handed out once."""

from __future__ import annotations

import random

import pytest

from glmconv.basics.dtypes import DType
from glmconv.engine.schedule import Job, Schedule, unfinished
from glmconv.engine.slots import TargetSlots
from glmconv.plan.plan import HASH_LEAF, Payload, TargetFile

SIZES = [0, 1, HASH_LEAF - 1, HASH_LEAF, 0, HASH_LEAF + 1, 10 * HASH_LEAF, 5, 7, 0]


def slots_of(sizes: list[int], index: int = 0) -> TargetSlots:
    target = TargetFile(f"file-{index}", 0)
    for number, size in enumerate(sizes):
        target.literals.append((target.size, b"head"))
        target.payloads.append(Payload(f"t{number}", DType.U8, (size,), target.size + 100, size, ()))
        target.size += 100 + size
    target.literals.append((target.size, b"tail"))
    target.size += 4
    return TargetSlots(index, target)


def take_all(schedule: Schedule, workers: int, seed: int = 0) -> list[tuple[int, Job]]:
    """Jobs as ``workers`` ask for them in random order."""
    rng, asking, jobs = random.Random(seed), list(range(workers)), []
    while asking:
        worker = rng.choice(asking)
        job = schedule.next(worker)
        if job is None:
            asking.remove(worker)
        else:
            jobs.append((worker, job))
    return jobs


def covered(jobs: list[tuple[int, Job]]) -> list[tuple[int, int]]:
    return sorted((job.slots.index, slot) for _, job in jobs for slot in range(job.first, job.end))


@pytest.mark.parametrize("sizes", [SIZES, [], [0], [0, 0], [HASH_LEAF * 3]])
def test_slots_cover_the_file_and_pieces_cover_the_payloads(sizes: list[int]) -> None:
    slots = slots_of(sizes)
    starts = [slots.start(slot) for slot in range(slots.count + 1)]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, slots.target.size)
    pieces = list(slots.pieces(0, slots.count))
    assert sum(stop - start for _, start, stop in pieces) == sum(sizes)
    one_by_one = [piece for slot in range(slots.count) for piece in slots.pieces(slot, slot + 1)]
    assert sum(stop - start for _, start, stop in one_by_one) == sum(sizes)
    assert all(stop - start <= HASH_LEAF for _, start, stop in one_by_one)
    assert slots.leaf_count(0, slots.count) == len(one_by_one)
    found = [lit for slot in range(slots.count) for lit in slots.literals(starts[slot], starts[slot + 1])]
    assert found == slots.target.literals


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("job_bytes", [HASH_LEAF, 3 * HASH_LEAF])
def test_every_slot_is_handed_out_once(workers: int, job_bytes: int) -> None:
    files = [slots_of(SIZES, 0), slots_of([50 * HASH_LEAF], 1), slots_of([], 2), slots_of([3] * 100, 3)]
    stretches = [stretch for slots in files for stretch in unfinished(slots, [])]
    jobs = take_all(Schedule(stretches, job_bytes), workers)
    assert covered(jobs) == [(slots.index, slot) for slots in files for slot in range(slots.count)]
    whole = [job for _, job in jobs if job.slots.start(job.end) - job.slots.start(job.first) > 2 * job_bytes]
    assert not whole


def test_finished_slots_are_not_handed_out_again() -> None:
    slots = slots_of([20 * HASH_LEAF, 5, 5])
    finished = [(3, 7), (5, 9), (21, 22), (0, 1)]
    jobs = take_all(Schedule(unfinished(slots, finished), HASH_LEAF), 2)
    done = {slot for first, end in finished for slot in range(first, end)}
    assert covered(jobs) == [(0, slot) for slot in range(slots.count) if slot not in done]
    assert unfinished(slots, [(0, slots.count)]) == []


def test_a_file_has_one_worker_while_there_are_files_enough() -> None:
    files = [slots_of([20 * HASH_LEAF], index) for index in range(4)]
    schedule = Schedule([s for slots in files for s in unfinished(slots, [])], HASH_LEAF)
    first = [schedule.next(worker) for worker in (0, 1)]
    assert [job.slots.index for job in first if job] == [0, 1]
    owner: dict[int, set[int]] = {}
    for worker in (0, 1) * 15:
        job = schedule.next(worker)
        assert job is not None
        owner.setdefault(job.slots.index, set()).add(worker)
    assert all(len(workers) == 1 for workers in owner.values())


def test_pieces_of_one_resumed_file_stay_with_one_worker() -> None:
    files = [slots_of([20 * HASH_LEAF], index) for index in range(2)]
    gaps = [(2, 3), (5, 6), (9, 10)]
    schedule = Schedule([s for slots in files for s in unfinished(slots, gaps)], HASH_LEAF)
    jobs = [(worker, schedule.next(worker)) for _ in range(15) for worker in (0, 1)]
    assert {(worker, job.slots.index) for worker, job in jobs if job} == {(0, 0), (1, 1)}


def test_one_huge_file_is_shared() -> None:
    schedule = Schedule(unfinished(slots_of([400 * HASH_LEAF]), []), 4 * HASH_LEAF)
    jobs = [(worker, schedule.next(worker)) for _ in range(40) for worker in (0, 1)]
    shares = {worker: sum(1 for who, job in jobs if who == worker and job) for worker in (0, 1)}
    assert min(shares.values()) >= 30


def test_a_small_payload_is_never_cut() -> None:
    """A clone of it is then one clone."""
    slots = slots_of([6 * HASH_LEAF] * 10)
    jobs = take_all(Schedule(unfinished(slots, []), 16 * HASH_LEAF), 1)
    assert all(job.first in slots.first for _, job in jobs)
    assert len(jobs) == 5
