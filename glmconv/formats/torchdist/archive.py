"""The zip archive that ``torch.save`` writes: stored members, each aligned to 64 bytes.

Written with every CRC 0, as torch does under ``torch.serialization.set_crc32_options(False)``:
the bytes around a payload must not depend on the payload. Read without ``zipfile``, which would
need a seekable object for each of many thousand archives in one file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from glmconv.basics.errors import DataError

ALIGNMENT = 64
"""Torch aligns every member's data to this many bytes from the archive's start."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_ENDS = _END64.size + _LOCATOR64.size + _END.size
_UTF8 = 0x0800
_SIZES_FOLLOW = 0x0008
_FULL32 = 0xFFFFFFFF


class Archive:
    """An archive under construction; the caller puts the returned pieces one after the other.

    ``checksum`` computes a member's CRC; torch's default fills them in, ours leaves them 0.
    """

    def __init__(self, checksum: Callable[[bytes], int] = lambda data: 0) -> None:
        self.size = 0
        self._checksum = checksum
        self._central: list[bytes] = []

    def open(self, name: str, length: int, crc: int = 0) -> bytes:
        """Local header of a member of ``length`` bytes, padded so that its data is aligned."""
        encoded = f"archive/{name}".encode()
        padding = -(self.size + _LOCAL.size + len(encoded) + 4) % ALIGNMENT
        # Torch's filler is an extra field with the tag FB, full of the letter Z.
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _UTF8 | (_SIZES_FOLLOW if length else 0)
        header = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        central = _CENTRAL.pack(
            b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, length, length, len(encoded), 0, 0, 0, 0, 0, self.size
        )
        self._central.append(central + encoded)
        self.size += len(header) + len(encoded) + len(extra) + length + len(self.close(length))
        return header + encoded + extra

    @staticmethod
    def close(length: int, crc: int = 0) -> bytes:
        """What follows a member's data."""
        return _DESCRIPTOR.pack(b"PK\x07\x08", crc, length, length) if length else b""

    def member(self, name: str, data: bytes) -> bytes:
        """A whole member."""
        crc = self._checksum(data)
        return self.open(name, len(data), crc) + data + self.close(len(data), crc)

    def end(self) -> bytes:
        """The central directory; torch always writes the zip64 form beside the plain one."""
        central = b"".join(self._central)
        size, start, count = len(central), self.size, len(self._central)
        return b"".join(
            (
                central,
                _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 45, 0, 0, count, count, size, start),
                _LOCATOR64.pack(b"PK\x06\x07", 0, start + size, 1),
                _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0),
            )
        )


@dataclass(frozen=True, slots=True)
class Member:
    """Where a stored member's data lies, counted from the archive's start."""

    offset: int
    size: int


ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: exactly ``size`` bytes of the archive, or an error of its own."""


class ArchiveReader:
    """The members of an archive of ``length`` bytes, by the names they have after the first ``/``.

    Raises :class:`DataError` for anything but a sound archive of stored members; ``where`` names
    the archive in errors. At most ``max_members`` members are taken.
    """

    def __init__(self, read: ReadAt, length: int, where: str, max_members: int = 1 << 16) -> None:
        self._read = read
        self._length = length
        self._where = where
        self._entries: dict[str, tuple[int, int]] = {}
        self._parse_directory(max_members)

    def names(self) -> list[str]:
        """Names of the members, without the archive's own name in front."""
        return list(self._entries)

    def member(self, name: str) -> Member:
        """Place of a member's data."""
        if name not in self._entries:
            self._refuse(f"has no member {name!r}")
        start, size = self._entries[name]
        header = _LOCAL.unpack(self._at(start, _LOCAL.size))
        if header[0] != b"PK\x03\x04":
            self._refuse(f"has no local header for {name!r}")
        offset = start + _LOCAL.size + header[9] + header[10]
        if offset + size > self._length:
            self._refuse(f"ends inside {name!r}")
        return Member(offset, size)

    def bytes_of(self, name: str, limit: int) -> bytes:
        """Data of a small member; refused above ``limit`` bytes."""
        member = self.member(name)
        if member.size > limit:
            self._refuse(f"has a member {name!r} of {member.size} bytes, more than {limit}")
        return self._at(member.offset, member.size)

    def part_of(self, name: str, start: int, size: int) -> bytes:
        """``size`` bytes of a member's data from ``start`` on."""
        member = self.member(name)
        if start + size > member.size:
            self._refuse(f"has {member.size} bytes in {name!r}, not {start + size}")
        return self._at(member.offset + start, size)

    def _at(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self._length:
            self._refuse(f"points at bytes {offset} to {offset + size}, outside of its {self._length} bytes")
        return self._read(offset, size)

    def _refuse(self, what: str) -> NoReturn:
        raise DataError(f"the torch archive {what}", where=self._where)

    def _parse_directory(self, max_members: int) -> None:
        count, size, start = self._find_directory()
        if count > max_members or size > max_members * 512:
            self._refuse(f"claims {count} members in {size} bytes of directory")
        central = self._at(start, size)
        position = 0
        for _ in range(count):
            if position + _CENTRAL.size > size:
                self._refuse("has a truncated directory")
            fields = _CENTRAL.unpack_from(central, position)
            position += _CENTRAL.size
            name_length, extra_length, comment_length = fields[10:13]
            encoded = central[position : position + name_length]
            extra = central[position + name_length : position + name_length + extra_length]
            position += name_length + extra_length + comment_length
            if fields[0] != b"PK\x01\x02" or position > size:
                self._refuse("has a broken directory")
            if fields[4] != 0 or fields[3] & 1:
                self._refuse(f"holds a compressed or encrypted member {encoded!r}")
            self._add(encoded, *_wide(fields[9], fields[8], fields[16], extra))

    def _add(self, encoded: bytes, size: int, stored: int, start: int) -> None:
        name = encoded.decode("utf-8", "replace").partition("/")[2]
        if size != stored or start + size > self._length:
            self._refuse(f"has a wrong size for {name!r}")
        if name in self._entries:
            self._refuse(f"holds {name!r} twice")
        self._entries[name] = (start, size)

    def _find_directory(self) -> tuple[int, int, int]:
        """Members, bytes and start of the central directory."""
        if self._length < _END.size:
            self._refuse(f"is only {self._length} bytes long")
        tail_length = min(_ENDS, self._length)
        tail = self._at(self._length - tail_length, tail_length)
        end = _END.unpack(tail[-_END.size :])
        if end[0] != b"PK\x05\x06":
            self._refuse("has no end record (cut short, or not a torch archive)")
        count, size, start = end[4:7]
        if tail_length == _ENDS and tail[_END64.size : _END64.size + 4] == b"PK\x06\x07":
            end64 = _END64.unpack(tail[: _END64.size])
            if end64[0] == b"PK\x06\x06":
                count, size, start = end64[7:10]
        return count, size, start


def _wide(size: int, stored: int, start: int, extra: bytes) -> tuple[int, int, int]:
    """The three numbers with those that did not fit 32 bits taken from the zip64 extra field."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        body = extra[position + 4 : position + 4 + length]
        if tag == 1:
            wide = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            size = next(wide, size) if size == _FULL32 else size
            stored = next(wide, stored) if stored == _FULL32 else stored
            start = next(wide, start) if start == _FULL32 else start
        position += 4 + length
    return size, stored, start


# Hash of the members' names, then of their CRCs (all 0): the same for every archive without tensors.
_SERIALIZATION_ID = b"0290846867776292310400046082544174525093"


def saved(pickle: bytes) -> bytes:
    """``torch.save`` of a value without tensors, whose pickle (protocol 2) is given."""
    archive = Archive()
    parts = [archive.member("data.pkl", pickle), archive.member(".format_version", b"1")]
    parts += [archive.member(".storage_alignment", b"64"), archive.member("byteorder", b"little")]
    parts += [archive.member("version", b"3\n"), archive.member(".data/serialization_id", _SERIALIZATION_ID)]
    return b"".join([*parts, archive.end()])
