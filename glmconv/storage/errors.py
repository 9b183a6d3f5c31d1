"""Errors of storages: what failed, on which object, and what to try."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from glmconv.basics.errors import DataError, StorageError

if TYPE_CHECKING:
    from glmconv.storage.objects import StorageObject

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


def changed_object(wanted: StorageObject, what: str) -> DataError:
    """The error of an object that is not the one whose identity was taken."""
    return DataError(
        f"the source {what}",
        where=wanted.address,
        hint="let nothing write to it meanwhile; a conversion is then started again with --overwrite",
    )


def too_short(wanted: StorageObject, offset: int, missing: int) -> DataError:
    """The error of an object that ends at ``offset``, ``missing`` bytes before a read of it does."""
    return changed_object(
        wanted, f"shrank: it ends at byte {offset}, {missing} bytes short of what its headers tell"
    )
