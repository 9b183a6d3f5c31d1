"""From a finished unit to a published one: one written order, and every state between recognised.

1. the unit, its manifest in it, and its directories are flushed;
2. ``journal`` becomes ``published``: an old unit that comes to stand where the new one was made is
   never taken for it;
3. one rename puts the unit in place (``RENAME_EXCHANGE`` where it replaces an old one; two renames
   where the filesystem has no exchange), and both directories are flushed;
4. the tracker;
5. what was replaced, ``published``, the lock and the staging directory go, in this order.

A run killed between any two of these leaves a state that :func:`recognise` names, and that the same
command finishes.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glmconv.engine.files import make_directories, sync_directory
from glmconv.engine.journal import JOURNAL, read_header
from glmconv.engine.lock import LOCK
from glmconv.engine.outcome import Stop
from glmconv.engine.places import Destination, unit_dir
from glmconv.storage.errors import storage_error

PUBLISHED = "published"
OLD = "old"

RENAME_EXCHANGE = 2
"""renameat2(2): both names keep existing, each with the other's directory."""


class State(enum.Enum):
    """What an earlier run left at a destination."""

    OPEN = "the unit is still to be made: nothing is there, or an unfinished run, or what is to be replaced"
    PUBLISHED = "the unit is in place, made by this very plan; the rest of the order is still to be done"


def recognise(place: Destination, plan: str, hash_mode: str, manifest: dict[str, Any] | None) -> State:
    """The state of a destination for the plan with this digest and a mode of hashing. Nothing is changed.

    ``manifest`` is what stands in ``place.final``. Its run is the one that ``published`` tells of,
    once that run has put its unit in place. A staging directory without journal and
    ``published`` is the last that a finished run leaves (or the first that a new one makes: that
    one may only overwrite here, and does).
    """
    if manifest is None or not is_of(manifest, plan, hash_mode):
        return State.OPEN
    header = read_header(place.staging / PUBLISHED)
    if header:
        ours = header.get("plan") == plan and header.get("run") == manifest.get("run")
        return State.PUBLISHED if ours else State.OPEN
    bare = place.staging.is_dir() and not (place.staging / JOURNAL).exists()
    return State.PUBLISHED if bare and not place.overwrite else State.OPEN


def is_of(manifest: dict[str, Any], plan: str, hash_mode: str) -> bool:
    """Whether a manifest is what a run of this plan leaves."""
    hashes = manifest.get("hash")
    hashed = isinstance(hashes, dict) and hashes.get("mode") == hash_mode
    return hashed and manifest.get("plan_digest") == plan


def reopen(place: Destination, run: str | None) -> None:
    """Take a run up again that was killed between steps 2 and 3. Raises StorageError.

    ``run`` is the run that the manifest in the staged unit names. Where it is not the one of
    ``published``, what is staged is the unit that was replaced: nothing of it is trusted.
    """
    header = read_header(place.staging / PUBLISHED)
    if not header:
        return
    try:
        if run is not None and header.get("run") == run:
            (place.staging / PUBLISHED).rename(place.staging / JOURNAL)
        else:
            (place.staging / PUBLISHED).unlink()
    except OSError as error:
        raise storage_error(error, place.staging, "take the unfinished run up again") from error
    sync_directory(place.staging)


def restore_old(place: Destination) -> None:
    """Put an old unit back that a run moved aside and did not replace. Raises StorageError."""
    old = place.staging / OLD
    if os.path.lexists(old) and not os.path.lexists(place.final):
        try:
            old.rename(place.final)
        except OSError as error:
            raise storage_error(error, place.final, "put the old unit back") from error
        sync_directory(place.final.parent)


def publish(
    place: Destination, *, guard: Callable[[], None] = lambda: None, stop: Stop | None = None
) -> None:
    """Make the unit durable and put it in place: steps 1 to 3.

    ``guard`` is called before each step and raises where the staging directory was lost to another
    process. The caller holds the lock. Raises StorageError or Interrupted; nothing is lost then, and
    the same call can be made again.
    """
    unit = unit_dir(place.staging)
    guard()
    place.check_final()
    _sync_tree(unit, stop or Stop())
    try:
        make_directories(place.final.parent)
        guard()
        (place.staging / JOURNAL).rename(place.staging / PUBLISHED)
        sync_directory(place.staging)
        guard()
        if place.final.is_dir() and any(place.final.iterdir()):
            _replace(place, unit, guard)
        else:
            unit.rename(place.final)
    except OSError as error:
        raise storage_error(error, place.final, "publish") from error
    sync_directory(place.final.parent)
    sync_directory(place.staging)


def _replace(place: Destination, unit: Path, guard: Callable[[], None]) -> None:
    """Exchange old and new; where the filesystem cannot, move the old one aside first."""
    try:
        _exchange(unit, place.final)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            raise
        old = place.staging / OLD
        if old.exists():
            remove_tree(old)
        guard()
        place.final.rename(old)
        unit.rename(place.final)


def _exchange(left: Path, right: Path) -> None:
    """Exchange two directories in one step, which Python has no call for. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2", None)  # glibc 2.28 and later, musl not
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    at_cwd = -100
    if call(at_cwd, os.fsencode(left), at_cwd, os.fsencode(right), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(right))


def _sync_tree(root: Path, stop: Stop) -> None:
    """Flush every file and directory under ``root``."""
    for directory, _, names in os.walk(root):
        for name in names:
            stop.check()
            path = os.path.join(directory, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise storage_error(error, path, "flush") from error
        sync_directory(directory)


def clean_up(staging: Path, *, keep: str = PUBLISHED) -> None:
    """Remove all in a staging directory but its lock; the file ``keep`` last. StorageError on failure."""
    try:
        names = sorted(os.listdir(staging), key=lambda name: name == keep)
        for name in names:
            if name != LOCK and not name.startswith((".nfs", ".fuse_hidden")):
                remove_tree(staging / name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, staging, "remove the staging directory") from error


def remove_tree(path: Path) -> None:
    """Remove a file or a directory with all in it; links are removed, not followed. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def write_atomically(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file so that a reader sees the old one or the whole new one. StorageError on failure.

    It is first written as ``temporary``, on the same filesystem.
    """
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise storage_error(error, path, "write") from error
    sync_directory(path.parent)
