"""Sharing extents between files: FICLONERANGE, and what can take its place."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from glmconv.basics.errors import StorageError
from glmconv.engine.files import OpenTarget
from glmconv.storage.errors import storage_error
from glmconv.storage.objects import OpenObject, StorageObject
from glmconv.storage.opened import examine_all

FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range), linux/fs.h
BLOCK = 4096
MIN_CLONE = 1 << 16
"""Ranges under this are copied: a clone costs two extents of metadata and tens of microseconds."""

MIN_HOLE = 1 << 16
"""Holes under this are copied as zeros, together with the data beside them."""

LARGEST_BLOCK = 1 << 16

REFUSALS = frozenset(
    {
        errno.EXDEV,
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EINVAL,
        errno.ENOSPC,
        errno.EPERM,
        errno.EACCES,
        errno.ETXTBSY,
        errno.EBADF,
        errno.EMLINK,
    }
)
"""Errors that mean "not this way": the same bytes can still be copied."""

PERMANENT = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
"""Refusals that hold for every range of the two filesystems."""

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.ceph", "afs", "gpfs", "beegfs"})
"""Filesystems whose servers may copy for us: bytes that stay there need not be sent back."""


def clone_range(source_fd: int, source_offset: int, target_fd: int, offset: int, size: int) -> None:
    """Let ``size`` bytes of the target share the source's extents. Raises OSError as the kernel says."""
    fcntl.ioctl(target_fd, FICLONERANGE, struct.pack("=qQQQ", source_fd, source_offset, size, offset))


def block_size(file: int | Path) -> int:
    """What clone offsets must be multiples of on the filesystem of a descriptor or path. StorageError."""
    try:
        size = os.statvfs(file).f_frsize
    except OSError as error:
        raise storage_error(error, str(file), "ask the filesystem for its block size") from error
    return size if BLOCK <= size <= LARGEST_BLOCK else BLOCK


def clone_refusal(source: Path | None, directory: Path) -> str | None:
    """Why files in ``directory`` cannot share extents with ``source``; None when they can.

    Tries it on a temporary file in ``directory``. Without a source (or with one smaller than a block)
    the trial is between two temporary files there. Raises StorageError when the directory or the
    source cannot be used at all.
    """
    stem = directory / f".glmconv-probe-{os.getpid()}-{secrets.token_hex(4)}"
    paths = [stem.with_suffix(".target"), stem.with_suffix(".source")]
    fds: list[int] = []
    try:
        fds.append(_open(paths[0], os.O_RDWR | os.O_CREAT | os.O_EXCL))
        block = block_size(fds[0])
        if source is None or _stat(source).st_size < block:
            fds.append(_open(paths[1], os.O_RDWR | os.O_CREAT | os.O_EXCL))
            _fill(fds[1], block, paths[1])
        else:
            fds.append(_open(source, os.O_RDONLY))
        return _try_clone(fds[1], fds[0], block)
    finally:
        for fd in fds:
            os.close(fd)
        for path in paths:
            path.unlink(missing_ok=True)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error(error, path, "open") from error


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise storage_error(error, path, "look at") from error


def _fill(fd: int, size: int, path: Path) -> None:
    try:
        os.pwrite(fd, b"\1" * size, 0)
    except OSError as error:
        raise storage_error(error, path, "write") from error


def _try_clone(source_fd: int, target_fd: int, block: int) -> str | None:
    try:
        clone_range(source_fd, 0, target_fd, 0, block)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return "source and destination are on different filesystems"
        if error.errno in PERMANENT:
            return "the filesystem cannot share extents between files (XFS and btrfs can)"
        return f"the filesystem refuses to share extents: {os.strerror(error.errno or 0)}"
    return None


def filesystem_type(device: int) -> str:
    """Type of the mounted filesystem with this ``st_dev``; empty when the kernel's table does not tell."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""  # only a hint is lost: which way of copying is tried first
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) > 2 and fields[2] == wanted:
            return right.split()[0]
    return ""


def extents(source: OpenObject, offset: int, size: int) -> Iterator[tuple[bool, int, int]]:
    """A source range as (is a hole, offset, size), in order; only holes of ``MIN_HOLE`` or more are told."""
    end = offset + size
    while offset < end:
        data = _seek(source, offset, end, os.SEEK_DATA) if source.sparse else offset
        if data - offset >= MIN_HOLE:
            yield True, offset, data - offset
            offset = data
        if offset < end:
            known = source.sparse and data < end
            stop = _seek(source, max(data, offset), end, os.SEEK_HOLE) if known else end
            yield False, offset, stop - offset
            offset = stop


def _seek(source: OpenObject, offset: int, end: int, whence: int) -> int:
    """Next data or hole at or behind ``offset``, at most ``end``."""
    if source.local_fd is None:
        return offset if whence == os.SEEK_DATA else end
    try:
        return min(os.lseek(source.local_fd, offset, whence), end)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole up to the file's end
            return end
        if error.errno in REFUSALS:  # the filesystem knows no holes: all is data
            source.sparse = False
            return offset if whence == os.SEEK_DATA else end
        raise storage_error(error, source.object.address, "look for holes in the source") from error


class Sharing:
    """What has been learnt about cloning to one destination; shared by all workers.

    ``reason`` says why bytes were copied instead of cloned (empty while nothing was refused).
    """

    def __init__(self, mode: str, directory: Path, server_copy: bool) -> None:
        self.mode = mode
        self.reason = "--copy-mode copy was asked for" if mode == "copy" else ""
        device = _stat(directory).st_dev
        self._offload = server_copy or filesystem_type(device) in NETWORK
        self._no_clone: set[int] = set()
        self._no_offload: set[int] = set()

    def may_clone(self, device: int | None) -> bool:
        """Whether files of this ``st_dev`` have not been refused so far; None: no local file."""
        return self.mode != "copy" and device is not None and device not in self._no_clone

    def probe(self, sources: Sequence[StorageObject], directory: Path) -> None:
        """Try the largest source of each device. Under ``clone`` a refusal is a StorageError.

        DataError where a source changed since it was planned, StorageError where one is gone.
        """
        if self.mode == "copy":
            return
        largest: dict[int, tuple[int, Path]] = {}
        for source, standing in zip(sources, examine_all(sources), strict=True):
            device, file = standing.device, Path(source.address)
            if device is None:
                self._refuse_remote(source, directory)
                continue
            largest[device] = max(largest.get(device, (-1, file)), (source.size, file))
        for device, (_, path) in largest.items():
            reason = clone_refusal(path, directory)
            if reason is None:
                continue
            if self.mode == "clone":
                raise StorageError(
                    f"cannot clone {path}: {reason}",
                    where=os.fspath(directory),
                    hint="use --copy-mode auto, or a destination on the source's filesystem",
                )
            self.reason = reason
            self._no_clone.add(device)

    def _refuse_remote(self, source: StorageObject, directory: Path) -> None:
        """No extents can be shared with what lies on no filesystem of this machine."""
        self.reason = "the source lies on no filesystem of this machine"
        if self.mode == "clone":
            raise StorageError(
                f"cannot clone {source.address}: {self.reason}",
                where=os.fspath(directory),
                hint="use --copy-mode auto",
            )

    def clone(
        self, source: OpenObject, source_offset: int, target: OpenTarget, offset: int, size: int
    ) -> bool:
        """Clone a block-aligned range; False when this range must be copied."""
        if source.local_fd is None or source.device is None:
            return False
        try:
            clone_range(source.local_fd, source_offset, target.fd, offset, size)
        except OSError as error:
            if error.errno not in REFUSALS or self.mode == "clone":
                raise storage_error(error, target.path, f"clone from {source.object.address}") from error
            self.reason = f"the filesystem refused to share some ranges: {os.strerror(error.errno or 0)}"
            if error.errno in PERMANENT:
                self._no_clone.add(source.device)
            return False
        return True

    def may_offload(self, source: OpenObject) -> bool:
        if source.device is None:
            return False
        return self.mode == "auto" and self._offload and source.device not in self._no_offload

    def offload(
        self, source: OpenObject, source_offset: int, target: OpenTarget, offset: int, size: int
    ) -> int:
        """Let the kernel or the server copy; returns the bytes done (the rest must be read and written)."""
        if source.local_fd is None or source.device is None:
            return 0
        try:
            return os.copy_file_range(source.local_fd, target.fd, size, source_offset, offset)
        except OSError as error:
            if error.errno not in REFUSALS or error.errno == errno.ENOSPC:
                raise storage_error(error, target.path, f"copy from {source.object.address}") from error
            self._no_offload.add(source.device)
            return 0
