"""Runs a plan: workers fill target files, a committer records what is on disk, the caller is told."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glmconv.basics.errors import DataError, StorageError, UsageError
from glmconv.engine.clone import Sharing
from glmconv.engine.commit import Committer, TargetFiles
from glmconv.engine.conditions import check_condition
from glmconv.engine.copy import Copier, Counters
from glmconv.engine.files import make_directories, sync_directory
from glmconv.engine.hashes import DIGEST_BYTES
from glmconv.engine.journal import JOURNAL, Finished, Found, Journal, open_journal
from glmconv.engine.outcome import CopyMode, HashMode, Outcome, Progress, Stop
from glmconv.engine.places import unit_dir
from glmconv.engine.rounding import RoundingCounts
from glmconv.engine.schedule import Job, Schedule, unfinished
from glmconv.engine.slots import target_slots
from glmconv.plan.plan import Plan
from glmconv.storage.errors import storage_error
from glmconv.storage.opened import OpenObjects, examine_all

JOURNAL_BYTES = 256 << 20
JOB_BYTES = 64 << 20
"""Bytes of one job at most (but at least one slot): what a worker does between two records."""

CLONE_WEIGHT = 16
"""A cloned byte's share of a written one's cost, when batches for the journal are measured."""

TICK = 0.1
"""Seconds between two calls of the progress function."""


def execute(
    plan: Plan,
    staging: Path,
    *,
    workers: int = 2,
    copy_mode: CopyMode = "auto",
    hash_mode: HashMode = "full",
    progress: Callable[[Progress], None] | None = None,
    stop: Stop | None = None,
    journal_bytes: int = JOURNAL_BYTES,
    restart: bool = False,
    guard: Callable[[], None] = lambda: None,
) -> Outcome:
    """Fill ``unit_dir(staging)`` with the plan's target files, resuming what an earlier run began.

    The caller holds the :class:`StagingLock` of ``staging``, which must exist. ``journal_bytes`` is what a
    crash may cost at most, roughly. ``restart`` discards an unfinished run of another plan instead of
    refusing it. ``guard`` is called before each write of the journal and raises where this process lost the
    staging directory to another (:meth:`StagingLock.check`). The bytes do not depend on ``workers``,
    ``copy_mode`` or interruptions.

    Raises DataError (a source changed or is short, two tensors that should be equal differ, a cast
    overflows), StorageError (space, permission, device, another run's journal, ``clone`` impossible)
    and Interrupted (``stop`` was set: what is finished is recorded).
    """
    if workers < 1:
        raise UsageError(f"{workers} workers cannot do anything", hint="use 1 or more")
    examine_all(plan.sources)
    journal, found = _open(plan, staging, hash_mode, restart, guard)
    try:
        options = _Options(copy_mode, hash_mode, journal_bytes, stop or Stop())
        return _Run(plan, staging, journal, found, options).execute(workers, progress)
    finally:
        journal.close()


def _open(
    plan: Plan, staging: Path, hash_mode: HashMode, restart: bool, guard: Callable[[], None]
) -> tuple[Journal, Found]:
    """The journal; without one of this plan the unit begins empty."""
    path = staging / JOURNAL
    try:
        journal, found = open_journal(path, plan, hash_mode, guard)
    except (DataError, StorageError):
        if not restart:
            raise
        guard()
        path.unlink(missing_ok=True)
        journal, found = open_journal(path, plan, hash_mode, guard)
    try:
        _clear(unit_dir(staging), set() if found is None else {target.path for target in plan.targets})
        if found is None:
            journal.begin(plan, hash_mode)
    except BaseException:
        journal.close()
        raise
    return journal, found or Found()


def _clear(unit: Path, kept: set[str]) -> None:
    """Leave only the ``kept`` files in the unit: what else an earlier run put there may be torn."""
    try:
        if unit.exists() and not kept:
            shutil.rmtree(unit)
        make_directories(unit)
        for folder, _, names in os.walk(unit):
            for path in (Path(folder, name) for name in names):
                if path.relative_to(unit).as_posix() not in kept:
                    path.unlink()
        sync_directory(unit)
    except OSError as error:
        raise storage_error(error, unit, "clear the unfinished run") from error


class _Stopping(Exception):
    """Ends a worker; the reason is told elsewhere."""


@dataclass(frozen=True, slots=True)
class _Options:
    copy_mode: CopyMode
    hash_mode: HashMode
    journal_bytes: int
    stop: Stop


class _Run:
    """One execution: what its threads share."""

    def __init__(self, plan: Plan, staging: Path, journal: Journal, found: Found, options: _Options) -> None:
        self._began = time.monotonic()
        self._plan, self._staging, self._journal, self._options = plan, staging, journal, options
        self._stop = options.stop
        self._failure: BaseException | None = None
        self._failure_lock = threading.Lock()
        self._targets = target_slots(plan)
        self._files = TargetFiles(unit_dir(staging), self._targets)
        self._digests = [bytearray(DIGEST_BYTES * (slots.count - 1)) for slots in self._targets]
        self._rounding = RoundingCounts(self._targets)
        self._reused = 0
        self._sharing = Sharing(options.copy_mode, staging, server_copy=options.hash_mode == "none")
        self._schedule = self._resume(found, min(JOB_BYTES, max(1, options.journal_bytes // 4)))
        self._open_conditions = [index for index in range(len(plan.conditions)) if index not in found.held]
        self._counters: list[Counters] = []
        self._committer: Committer | None = None

    def _resume(self, found: Found, job_bytes: int) -> Schedule:
        """Take over what an earlier run finished; the schedule holds the rest."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        told = sorted({done.target for done in found.finished})
        lost = [index for index in told if not self._files.is_kept(index)]
        for index in lost:  # changed behind our back: written anew, after the journal says so
            self._journal.forget(index)
            self._files.path(index).unlink(missing_ok=True)
        for done in found.finished:
            if done.target not in lost:
                ranges.setdefault(done.target, []).append((done.first, done.end))
                self._keep(done)
        stretches = []
        for slots in self._targets:
            left = unfinished(slots, ranges.get(slots.index, []))
            self._files.expect(slots.index, sum(stretch.end - stretch.first for stretch in left))
            self._reused += slots.payload_bytes(0, slots.count)
            self._reused -= sum(slots.payload_bytes(stretch.first, stretch.end) for stretch in left)
            stretches += left
        return Schedule(stretches, job_bytes)

    def _keep(self, done: Finished) -> None:
        """Take a job's digests, and what its casts lost."""
        self._rounding.take(done.target, done.rounded)
        at = DIGEST_BYTES * done.first
        self._digests[done.target][at : at + len(done.digests)] = done.digests

    def execute(self, workers: int, progress: Callable[[Progress], None] | None) -> Outcome:
        self._sharing.probe(self._plan.sources, self._staging)
        self._committer = Committer(self._files, self._journal, self._options.journal_bytes, self._fail)
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"glmconv-copy-{worker}")
            for worker in range(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            self._watch(threads, progress)
        except BaseException as error:  # a KeyboardInterrupt, or the progress function failed: raised below
            self._fail(error)
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._committer.close()
            self._files.close()
        if self._failure is not None:
            raise self._failure
        self._stop.check()
        examine_all(self._plan.sources)
        if progress is not None:
            progress(self._progress())
        return self._outcome()

    def _watch(self, threads: list[threading.Thread], progress: Callable[[Progress], None] | None) -> None:
        for thread in threads:
            while thread.is_alive():
                thread.join(TICK)
                if progress is not None:
                    progress(self._progress())

    def _progress(self) -> Progress:
        done = self._reused + sum(counters.payload for counters in self._counters)
        return Progress(done, self._plan.payload_bytes, self._reused, time.monotonic() - self._began)

    def _fail(self, error: BaseException) -> None:
        with self._failure_lock:
            if self._failure is None:
                self._failure = error

    def _check_stop(self) -> None:
        if self._failure is not None or self._stop.is_set():
            raise _Stopping

    def _work(self, worker: int) -> None:
        sources = OpenObjects(self._plan.sources)
        try:
            copier = Copier(sources, self._sharing, self._options.hash_mode == "full", self._check_stop)
            self._counters.append(copier.counters)
            self._check_conditions(sources)
            while (job := self._schedule.next(worker)) is not None:
                self._check_stop()
                self._do(job, copier)
        except _Stopping:
            pass
        except BaseException as error:  # handed on, not swallowed: execute raises it
            self._fail(error)
        finally:
            sources.close()

    def _check_conditions(self, sources: OpenObjects) -> None:
        while self._open_conditions:
            try:
                index = self._open_conditions.pop()
            except IndexError:  # another worker took the last
                return
            check_condition(self._plan.conditions[index], sources, self._check_stop)
            self._commit().held(index)

    def _do(self, job: Job, copier: Copier) -> None:
        slots = job.slots
        before = copier.counters.cloned
        digests, rounded = copier.run(slots, job.first, job.end, self._files.get(slots.index))
        done = Finished(slots.index, job.first, job.end, digests, rounded)
        self._keep(done)
        cloned = copier.counters.cloned - before
        size = slots.start(job.end) - slots.start(job.first)
        self._commit().finished(done, size - cloned + cloned // CLONE_WEIGHT)

    def _commit(self) -> Committer:
        if self._committer is None:
            raise RuntimeError("the committer starts before the workers")
        return self._committer

    def _outcome(self) -> Outcome:
        def total(name: str) -> int:
            return sum(int(getattr(counters, name)) for counters in self._counters)

        return Outcome(
            run=self._journal.run,
            copy_mode=self._options.copy_mode,
            hash_mode=self._options.hash_mode,
            bytes_cloned=total("cloned"),
            bytes_copied=total("copied"),
            bytes_computed=total("computed"),
            bytes_zero=total("zero"),
            bytes_literal=total("literal"),
            bytes_reused=self._reused,
            bytes_reread=total("reread"),
            reread_seconds=sum(counters.reread_seconds for counters in self._counters),
            seconds=time.monotonic() - self._began,
            clone_reason=self._sharing.reason,
            rounding=self._rounding.by_tensor(),
            leaves=self._leaves() if self._options.hash_mode == "full" else {},
        )

    def _leaves(self) -> dict[tuple[str, int], bytes]:
        leaves = {}
        for slots, digests in zip(self._targets, self._digests, strict=True):
            for index, (first, end) in enumerate(zip(slots.first, slots.first[1:], strict=False)):
                leaves[slots.target.path, index] = bytes(digests[DIGEST_BYTES * first : DIGEST_BYTES * end])
        return leaves
