"""Files of a local (or mounted) filesystem as a storage."""

from __future__ import annotations

import os
from pathlib import Path

from glmconv.basics.errors import StorageError
from glmconv.storage.errors import changed_object, storage_error, too_short
from glmconv.storage.objects import OpenObject, Standing, StorageObject

READ_SIZE = 1 << 20
MTIME = "mtime_ns"
CTIME = "ctime_ns"


def file_version(status: os.stat_result) -> tuple[tuple[str, int | str], ...]:
    """Modification time, and the inode's time of change.

    A copy that keeps its source's modification time (``cp -p``, ``rsync -t``) has another time of
    change.
    """
    return ((MTIME, status.st_mtime_ns), (CTIME, status.st_ctime_ns))


def identify(path: Path, header_digest: str = "") -> StorageObject:
    """The identity that a file has now. Raises StorageError."""
    try:
        status = path.stat()
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=str(path)) from error
    return StorageObject(str(path.resolve()), status.st_size, file_version(status), header_digest)


class LocalFile:
    """An open file."""

    __slots__ = ("_fd", "device", "local_fd", "object", "read_size", "sparse")

    def __init__(self, wanted: StorageObject) -> None:
        self.object = wanted
        self.read_size = READ_SIZE
        try:
            self._fd = os.open(wanted.address, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, wanted.address, "open the source") from error
        try:
            status = os.fstat(self._fd)
            _require_same(wanted, status)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(self._fd)
            raise
        self.local_fd: int | None = self._fd
        self.device: int | None = status.st_dev
        self.sparse = status.st_blocks * 512 < status.st_size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset``. DataError when the file ends early, StorageError on I/O errors."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:] if done else view], offset + done)
            except OSError as error:
                raise storage_error(error, self.object.address, "read the source") from error
            if got == 0:
                raise too_short(self.object, offset + done, len(view) - done)
            done += got

    def close(self) -> None:
        os.close(self._fd)


class LocalStorage:
    """The filesystems of this machine."""

    def examine(self, wanted: StorageObject) -> Standing:
        try:
            status = os.stat(wanted.address)
        except OSError as error:
            raise storage_error(error, wanted.address, "read the source") from error
        _require_same(wanted, status)
        return Standing(status.st_dev, max(0, status.st_size - status.st_blocks * 512))

    def open(self, wanted: StorageObject) -> OpenObject:
        return LocalFile(wanted)


def _require_same(wanted: StorageObject, status: os.stat_result) -> None:
    """Raise DataError unless size and modification time are those that were planned.

    The time of change is left to the journal: a link or a permission that is new while a run goes
    on alters it, the bytes stay.
    """
    if status.st_size != wanted.size:
        grew = "grew" if status.st_size > wanted.size else "shrank"
        raise changed_object(
            wanted, f"{grew} from {wanted.size} to {status.st_size} bytes since it was planned"
        )
    planned = dict(wanted.version).get(MTIME)
    if status.st_mtime_ns != planned:
        raise changed_object(wanted, "was modified since it was planned (its modification time differs)")
