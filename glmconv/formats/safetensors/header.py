"""The header of a safetensors file, read and written byte for byte.

Format (safetensors README): 8 bytes little-endian length, that many bytes of JSON, then the data.
Entries ``{name: {dtype, shape, data_offsets: [begin, end]}}`` cover the data without gap or
overlap; JSON may be padded with trailing spaces.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from glmconv.basics.abbreviated import brief
from glmconv.basics.dtypes import BY_LABEL, DType
from glmconv.basics.errors import DataError, Defect, StorageError

MAX_HEADER = 100_000_000
"""safetensors refuses longer headers; so do we, before any memory is taken."""

PAGE = 4096
"""Blocks of filesystems are multiples of it: bytes that lie alike modulo a page can be shared."""

MAX_AXES = 64
"""No tensor has more: the product of a long list of sizes would take for ever."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: ``begin`` and ``end`` count from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header. ``text`` is the JSON as it stands, padding included."""

    text: bytes
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]

    @property
    def data_start(self) -> int:
        """Offset of the data in the file, in bytes."""
        return 8 + len(self.text)

    @property
    def file_size(self) -> int:
        return self.data_start + max((entry.end for entry in self.entries), default=0)


def read_header(path: Path) -> Header:
    """Read and validate one file's header against the file's size.

    Raises StorageError where the file cannot be read, DataError with every defect found otherwise.
    """
    try:
        # Looked at before it is opened: opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError("is not a regular file", where=str(path))
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
                raise DataError(
                    f"not a whole safetensors file: {size:,} bytes, header said to be {length:,} long",
                    where=str(path),
                    hint="download or copy the file again",
                )
            text = stream.read(length)
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=str(path)) from error
    if len(text) < length:
        raise DataError("file shrank while its header was read", where=str(path))
    return parse_header(text, size, str(path))


def parse_header(text: bytes, file_size: int, where: str) -> Header:
    """Validate a header's JSON; ``file_size`` is the whole file's. Raises DataError."""
    defects: list[Defect] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            twice = (name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            defects.extend(Defect("duplicate", "named twice in one header", f"{where}: {n}") for n in twice)
        return dict(pairs)

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"header is not JSON: {error}", where=where) from error
    if not isinstance(content, dict):
        raise DataError("header is not a JSON object", where=where)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        defects.append(Defect("header", "__metadata__ is not an object of strings", where))
        metadata = {}
    entries = [entry for name, raw in content.items() if (entry := _entry(name, raw, where, defects))]
    defects += _gaps(entries, file_size - 8 - len(text), where)
    if defects:
        raise DataError("the safetensors header is wrong", where=where, defects=defects)
    return Header(text, tuple(entries), metadata)


def _entry(name: str, raw: Any, where: str, defects: list[Defect]) -> HeaderEntry | None:
    place = f"{where}: {name}"
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= raw.keys():
        defects.append(Defect("header", "entry lacks dtype, shape or data_offsets", place))
        return None
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BY_LABEL:
        defects.append(Defect("dtype", f"unknown dtype {brief(dtype)}", place))
        return None
    if not _naturals(shape, MAX_AXES) or not _naturals(offsets, 2) or len(offsets) != 2:
        what = f"bad shape {brief(shape)} or data_offsets {brief(offsets)}"
        defects.append(Defect("header", what, place))
        return None
    want = prod(shape) * BY_LABEL[dtype].itemsize
    if offsets[1] - offsets[0] != want:
        defects.append(
            Defect("header", f"{dtype}{shape} needs {want:,} bytes, data_offsets give {offsets}", place)
        )
        return None
    return HeaderEntry(name, BY_LABEL[dtype], tuple(shape), offsets[0], offsets[1])


def _naturals(value: Any, most: int) -> bool:
    """Whether it is a list of at most ``most`` sizes."""
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _gaps(entries: Iterable[HeaderEntry], data_size: int, where: str) -> list[Defect]:
    defects, at = [], 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        place = f"{where}: {entry.name}"
        if entry.begin < at:
            defects.append(
                Defect("overlap", f"overlaps the tensor before it by {at - entry.begin} bytes", place)
            )
        elif entry.begin > at:
            defects.append(Defect("gap", f"{entry.begin - at} bytes before it belong to no tensor", place))
        at = max(at, entry.end)
    if at > data_size:
        defects.append(
            Defect(
                "truncated",
                f"header describes {at:,} bytes of data, the file has {data_size:,}",
                where,
                "the file is truncated: download or copy it again",
            )
        )
    elif at < data_size:
        defects.append(Defect("gap", f"{data_size - at:,} bytes at the end belong to no tensor", where))
    return defects


def write_header(
    entries: Iterable[tuple[str, DType, tuple[int, ...]]],
    metadata: Mapping[str, str],
    residue: int | None = None,
) -> bytes:
    """The bytes before the data: length and JSON, for tensors laid out in the given order.

    The JSON is padded with spaces so that the data starts at a multiple of 8, as safetensors'
    own writer does; with ``residue`` (a multiple of 8) at that residue modulo 4096.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in entries:
        end = at + prod(shape) * dtype.itemsize
        content[name] = {"dtype": dtype.label, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    pad = -(8 + len(text)) % 8 if residue is None else (residue - 8 - len(text)) % PAGE
    return (len(text) + pad).to_bytes(8, "little") + text + b" " * pad
