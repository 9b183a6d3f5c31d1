"""Disk images, shared extents and where a file's blocks lie (Linux)."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
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


def compare(left: Path, right: Path) -> tuple[int, int]:
    """Bytes of two files of one filesystem that are the same blocks (or holes), and bytes read to compare.

    Raises ``ValueError`` where the files differ.
    """
    size = left.stat().st_size
    if right.stat().st_size != size:
        raise ValueError(f"{right}: {right.stat().st_size} bytes, not {size}")
    shared = read = 0
    ours, theirs = extents(left), extents(right)
    with left.open("rb", buffering=0) as a, right.open("rb", buffering=0) as b:
        at = 0
        while at < size:
            here, there = _at(ours, at), _at(theirs, at)
            end = min(here[1], there[1], size)
            if here[0] == there[0] != NOWHERE:
                shared += end - at
            else:
                for start in range(at, end, READ):
                    length = min(READ, end - start)
                    if os.pread(a.fileno(), length, start) != os.pread(b.fileno(), length, start):
                        raise ValueError(f"{right} differs within {length} bytes from byte {start}")
                read += end - at
            at = end
    return shared, read


def _at(extents_left: list[Extent], at: int) -> tuple[int, int]:
    """Device place of byte ``at`` and where that stretch ends; extents behind it are dropped."""
    while extents_left and extents_left[0][0] + extents_left[0][2] <= at:
        extents_left.pop(0)
    if not extents_left:
        return HOLE, 1 << 63
    logical, physical, length = extents_left[0]
    if at < logical:
        return HOLE, logical
    return (NOWHERE if physical < 0 else physical + at - logical), logical + length
