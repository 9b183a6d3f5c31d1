"""Makes finished jobs durable, then known: fdatasync of their files, then records in the journal.

It runs beside the workers in a thread of its own, so that flushing overlaps with copying.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from glmconv.engine.files import OpenTarget, make_directories, sync_directory
from glmconv.engine.journal import Finished, Journal
from glmconv.engine.slots import TargetSlots
from glmconv.storage.errors import storage_error

INTERVAL = 2.0
"""Seconds after which finished jobs are recorded even when they are small."""

MAX_FILES = 64
"""Files waiting for a flush at most: each is held open."""


class TargetFiles:
    """The open target files. One stays open from its first write to the flush after its last."""

    def __init__(self, unit: Path, targets: list[TargetSlots]) -> None:
        self._unit = unit
        self._targets = targets
        self._open: dict[int, OpenTarget] = {}
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()

    def path(self, index: int) -> Path:
        return self._unit / self._targets[index].target.path

    def expect(self, index: int, slots: int) -> None:
        """``slots`` of target ``index`` are to be written; those of an earlier run are not counted."""
        self._left[index] = slots

    def is_kept(self, index: int) -> bool:
        """Whether a file that an earlier run wrote is still there, whole. StorageError on failure."""
        path = self.path(index)
        try:
            return path.stat().st_size == self._targets[index].target.size
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, path, "find what the unfinished run wrote") from error

    def get(self, index: int) -> OpenTarget:
        """Target ``index``, open for writing; the file is created with its full size, all holes."""
        with self._lock:
            if index not in self._open:
                path = self.path(index)
                fd = self._create(path, self._targets[index].target.size)
                self._open[index] = OpenTarget(fd, os.fspath(path))
            return self._open[index]

    def _create(self, path: Path, size: int) -> int:
        try:
            make_directories(path.parent)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(fd).st_size != size:
                    os.ftruncate(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise storage_error(error, path, "create") from error
        return fd

    def flush(self, index: int) -> None:
        """Put what was written to target ``index`` on the device. StorageError on failure."""
        # The descriptor that wrote: a failed write-back is then reported here and nowhere else.
        try:
            os.fdatasync(self._open[index].fd)
        except OSError as error:
            raise storage_error(error, self.path(index), "flush") from error

    def written(self, index: int, slots: int) -> None:
        """Count flushed slots; close the file after the last."""
        with self._lock:
            self._left[index] -= slots
            if self._left[index] == 0:
                os.close(self._open.pop(index).fd)

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1].fd)


class Committer:
    """Collects finished jobs and records them in batches; owns the journal while it runs."""

    def __init__(
        self, files: TargetFiles, journal: Journal, batch_bytes: int, failed: Callable[[BaseException], None]
    ) -> None:
        self._files = files
        self._journal = journal
        self._batch_bytes = batch_bytes
        self._failed = failed
        self._changed = threading.Condition()
        self._finished: list[Finished] = []
        self._held: list[int] = []
        self._bytes = 0
        self._since = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="glmconv-journal")
        self._thread.start()

    def finished(self, job: Finished, weight: int) -> None:
        """Take a finished job; ``weight`` is roughly what flushing it costs, in bytes."""
        self._take(lambda: self._finished.append(job), weight)

    def held(self, index: int) -> None:
        """Take the number of a condition that holds."""
        self._take(lambda: self._held.append(index), 0)

    def _take(self, add: Callable[[], None], weight: int) -> None:
        with self._changed:
            if not (self._finished or self._held):
                self._since = time.monotonic()
            add()
            self._bytes += weight
            self._changed.notify()

    def close(self) -> None:
        """Record what is left and end. A failure was told to ``failed``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                self._commit()
        except BaseException as error:  # handed on, not swallowed: execute raises it
            self._failed(error)

    def _wait(self) -> bool:
        """Wait for a batch; False at the end."""
        with self._changed:
            while True:
                waiting = bool(self._finished or self._held)
                if self._closing:
                    return waiting
                age = time.monotonic() - self._since
                files = len({job.target for job in self._finished})
                if waiting and (self._bytes >= self._batch_bytes or age >= INTERVAL or files >= MAX_FILES):
                    return True
                self._changed.wait(max(0.0, INTERVAL - age) if waiting else None)

    def _commit(self) -> None:
        with self._changed:
            jobs, self._finished = self._finished, []
            held, self._held = self._held, []
            self._bytes = 0
        slots: dict[int, int] = {}
        for job in jobs:
            slots[job.target] = slots.get(job.target, 0) + job.end - job.first
        for index in slots:
            self._files.flush(index)
        for directory in {self._files.path(index).parent for index in slots}:
            sync_directory(directory)
        self._journal.append(jobs, held)
        for index, count in slots.items():
            self._files.written(index, count)
