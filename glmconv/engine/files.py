"""Files that are written, with errors that name the file and what to try."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from glmconv.storage.errors import storage_error


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
