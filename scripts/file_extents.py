"""Disk images, shared extents and where a file's blocks lie (Linux)."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FICLONERANGE = 0x4020940D
FS_IOC_FIEMAP = 0xC020660B
FIEMAP_HEAD = struct.Struct("=QQLLLL")
FIEMAP_EXTENT = struct.Struct("=QQQQQLLLL")
FIEMAP_MANY = 512
LAST, UNKNOWN = 1, 2 | 4 | 8 | 0x80 | 0x100 | 0x200 | 0x400
"""Flags: the last extent; an extent whose place is not known, encoded, packed or not yet written."""

HOLE, NOWHERE = -2, -1
READ = 1 << 20

Extent = tuple[int, int, int]
"""Offset in the file, place on the device (``NOWHERE`` where that is not known), size; all in bytes."""


@contextmanager
def mounted_image(directory: Path, kind: str, size: int) -> Iterator[Path]:
    """A sparse image of ``size`` bytes with a fresh filesystem of ``kind``, mounted; removed at the end."""
    image, point = directory / f"{kind}.image", directory / f"{kind}.mounted"
    point.mkdir(parents=True)
    try:
        with image.open("xb") as file:
            file.truncate(size)
        subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
        try:
            yield point
        finally:
            subprocess.run(["umount", str(point)], check=True)
    finally:
        image.unlink(missing_ok=True)
        point.rmdir()


def clone(source: int, source_offset: int, target: int, offset: int, size: int) -> None:
    """Let a range of file descriptor ``target`` share the extents of ``source``."""
    fcntl.ioctl(target, FICLONERANGE, struct.pack("=qQQQ", source, source_offset, size, offset))


def extents(path: Path) -> list[Extent]:
    """A file's extents in order; holes are left out. The file must be on the device already."""
    found: list[Extent] = []
    with path.open("rb") as file:
        at, last = 0, False
        while not last:
            head = FIEMAP_HEAD.pack(at, (1 << 64) - 1 - at, 0, 0, FIEMAP_MANY, 0)
            buffer = bytearray(head + bytes(FIEMAP_MANY * FIEMAP_EXTENT.size))
            fcntl.ioctl(file.fileno(), FS_IOC_FIEMAP, buffer)
            count = FIEMAP_HEAD.unpack_from(buffer)[3]
            for number in range(count):
                fields = FIEMAP_EXTENT.unpack_from(buffer, FIEMAP_HEAD.size + number * FIEMAP_EXTENT.size)
                logical, physical, length, flags = fields[0], fields[1], fields[2], fields[5]
                found.append((logical, NOWHERE if flags & UNKNOWN else physical, length))
                at, last = logical + length, bool(flags & LAST)
            last = last or count == 0
    return found


class FileMap:
    """Where the bytes of a file lie on the device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._extents = extents(path)
        self._ends = [logical + length for logical, _, length in self._extents]

    def at(self, offset: int) -> tuple[int, int]:
        """Device place of a byte (or ``HOLE``, ``NOWHERE``) and where its stretch ends."""
        number = bisect_right(self._ends, offset)
        if number == len(self._extents):
            return HOLE, 1 << 63
        logical, physical, _ = self._extents[number]
        if offset < logical:
            return HOLE, logical
        return (NOWHERE if physical < 0 else physical + offset - logical), self._ends[number]

    def read(self, offset: int, size: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)


def compare(left: FileMap, at: int, right: FileMap, there: int, size: int) -> int:
    """Compare ``size`` bytes of two files: the same blocks (or holes) are equal, the rest is read.

    Returns the bytes that were read of each. Raises ``ValueError`` where they differ.
    """
    read, end = 0, at + size
    while at < end:
        (mine, mine_end), (other, other_end) = left.at(at), right.at(there)
        step = min(mine_end - at, other_end - there, end - at)
        if mine != other or mine == NOWHERE:
            step = min(step, READ)
            if left.read(at, step) != right.read(there, step):
                raise ValueError(f"{right.path} differs within {step} bytes from byte {there}")
            read += step
        at, there = at + step, there + step
    return read


def used_bytes(path: Path) -> int:
    """Bytes of a filesystem that are taken, once everything written is on the device."""
    os.sync()
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def allocated_bytes(directory: Path) -> int:
    """Bytes that the files of a directory have on the device, shared ones included."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def forget(paths: Iterable[Path]) -> None:
    """Drop what the page cache holds of files, so that a run reads them from the disk."""
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle(path: Path) -> None:
    """Wait until removed files have given their blocks back, which XFS does in the background."""
    before = -1
    for _ in range(30):
        now = used_bytes(path)
        if now == before:
            return
        before = now
        time.sleep(2)
