"""Open files and whole reads and writes, with errors that name the file and what to try."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glmconv.basics.errors import DataError, StorageError
from glmconv.plan.plan import SourceFile

OPEN_SOURCES = 32
"""Sources that one worker keeps open: far under the usual limit of 1,024 files."""

_HINTS = {
    errno.ENOSPC: "free space on that filesystem and run the same command again: it resumes",
    errno.EDQUOT: "raise the quota or free space and run the same command again: it resumes",
    errno.EROFS: "choose a destination on a writable filesystem",
    errno.EACCES: "give this user the permission, or choose another path",
    errno.EPERM: "give this user the permission, or choose another path",
    errno.EIO: "the device failed: look at the kernel's log, then run the same command again: it resumes",
    errno.ENOENT: "check the path",
    errno.EFBIG: "the filesystem or `ulimit -f` limits a file's size: raise it or choose another place",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit of open files (`fs.file-max`)",
    errno.ESTALE: "the network filesystem lost the file: remount it and run the same command again",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
}


def storage_error(error: OSError, path: str | os.PathLike[str], doing: str) -> StorageError:
    """``error`` as a StorageError: what failed, on which file, and what to try."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = _HINTS.get(error.errno or 0, "check the filesystem and run the same command again")
    return StorageError(f"cannot {doing}: {reason}", where=os.fspath(path), hint=hint)


def changed_source(source: SourceFile, what: str) -> DataError:
    """The error of a source that is not the one that was planned."""
    return DataError(
        f"the source {what}",
        where=source.path,
        hint="let nothing write to the source during a conversion, then start again with --overwrite",
    )


def check_identity(source: SourceFile, stat: os.stat_result) -> None:
    """Raise DataError unless size and modification time are those that were planned."""
    if stat.st_size != source.size:
        grew = "grew" if stat.st_size > source.size else "shrank"
        what = f"{grew} from {source.size} to {stat.st_size} bytes since it was planned"
        raise changed_source(source, what)
    if stat.st_mtime_ns != source.mtime_ns:
        raise changed_source(source, "was modified since it was planned (its modification time differs)")


def check_sources(sources: Sequence[SourceFile]) -> list[os.stat_result]:
    """Stat every source again. DataError when one changed, StorageError when one is gone."""
    stats = []
    for source in sources:
        try:
            stats.append(os.stat(source.path))
        except OSError as error:
            raise storage_error(error, source.path, "read the source") from error
        check_identity(source, stats[-1])
    return stats


class OpenSource:
    """An open source: ``fd``, ``device`` and whether it may have holes (``sparse``)."""

    __slots__ = ("device", "fd", "source", "sparse")

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        try:
            self.fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, source.path, "open the source") from error
        try:
            stat = os.fstat(self.fd)
            check_identity(source, stat)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(self.fd)
            raise
        self.device = stat.st_dev
        self.sparse = stat.st_blocks * 512 < stat.st_size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset``. DataError when the file ends early, StorageError on I/O errors."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.fd, [view[done:] if done else view], offset + done)
            except OSError as error:
                raise storage_error(error, self.source.path, "read the source") from error
            if got == 0:
                missing = len(view) - done
                what = f"shrank: it ends at byte {offset + done}, {missing} bytes short of a planned read"
                raise changed_source(self.source, what)
            done += got


class Sources:
    """The sources of one worker: opened on first use, the least recently used closed beyond a bound."""

    def __init__(self, sources: Sequence[SourceFile], limit: int = OPEN_SOURCES) -> None:
        self._sources = sources
        self._limit = limit
        self._open: OrderedDict[int, OpenSource] = OrderedDict()

    def get(self, index: int) -> OpenSource:
        """The open source ``index``; DataError when it is not the one that was planned."""
        found = self._open.get(index)
        if found is not None:
            self._open.move_to_end(index)
            return found
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1].fd)
        opened = self._open[index] = OpenSource(self._sources[index])
        return opened

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1].fd)


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A file that is being written: ``path`` is for messages."""

    fd: int
    path: str


def write_all(target: OpenTarget, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``. StorageError on failure."""
    done = 0
    while done < len(view):
        try:
            done += os.pwritev(target.fd, [view[done:] if done else view], offset + done)
        except OSError as error:
            raise storage_error(error, target.path, "write") from error


def make_directories(path: Path) -> None:
    """Create ``path`` and what is missing above it, each made durable in the directory that holds it.

    Raises OSError; directories that another process creates meanwhile are fine.
    """
    missing = [path]
    while not missing[-1].parent.is_dir() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    for directory in reversed(missing):
        if not directory.is_dir():
            directory.mkdir(exist_ok=True)
            sync_directory(directory.parent)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames and new names in a directory durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems know no fsync of a directory
            raise storage_error(error, path, "flush the directory") from error
