"""How an HF checkpoint was cut into shards, kept so that it can be written again byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glmconv.basics.errors import DataError, Defect
from glmconv.basics.json_files import MAX_RECORD, parse_json, read_json
from glmconv.formats.safetensors.checkpoint import SINGLE, HfCheckpoint, index_map, plain_name
from glmconv.formats.safetensors.header import Header, parse_header

FILE = "glmconv-origin.json"
"""Name of the record beside the HF side files of a torch_dist that glmconv wrote."""

SUFFIX = ".safetensors"


@dataclass(slots=True)
class Origin:
    """Headers of the shards, in order, and the index, all verbatim."""

    headers: dict[str, Header]
    index: bytes | None

    @classmethod
    def of(cls, checkpoint: HfCheckpoint) -> Origin:
        return cls(dict(checkpoint.headers), checkpoint.index)

    def to_json(self) -> bytes:
        """The record's bytes."""
        return json.dumps(
            {
                "shards": {name: header.text.decode("utf-8") for name, header in self.headers.items()},
                "index": None if self.index is None else self.index.decode("utf-8"),
            },
            ensure_ascii=False,
        ).encode()

    @classmethod
    def from_file(cls, path: Path) -> Origin:
        """Read the record back, every header validated again. Raises StorageError or DataError."""
        content = read_json(path, MAX_RECORD)
        shards, index = content.get("shards"), content.get("index")
        if not isinstance(shards, dict) or not all(isinstance(text, str) for text in shards.values()):
            raise DataError("is not a record of shards", where=str(path))
        bad = sorted(name for name in shards if not plain_name(name) or not name.endswith(SUFFIX))
        if bad:
            raise DataError(
                "names shards that are no safetensors files inside the checkpoint's directory",
                where=str(path),
                defects=[Defect("path", "not a plain name of a shard", name) for name in bad],
            )
        if index is not None and not isinstance(index, str):
            raise DataError("its index is not text", where=str(path))
        headers = {name: _parse(f"{path}: {name}", text) for name, text in shards.items()}
        origin = cls(headers, None if index is None else _encoded(index, str(path)))
        origin._check_index(str(path))
        return origin

    def _check_index(self, where: str) -> None:
        """The index is written again as it stands, so it must be that of the shards."""
        held = [(entry.name, file) for file, header in self.headers.items() for entry in header.entries]
        said = {name: SINGLE for name, _ in held}
        if self.index is not None:
            said = index_map(parse_json(self.index, where), where)
        if len(held) != len(dict(held)) or said != dict(held):
            raise DataError("its index is not that of its shards", where=where)

    def names(self) -> set[str]:
        """All tensors that the origin held."""
        return {entry.name for header in self.headers.values() for entry in header.entries}


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"holds text that is not Unicode: {error.reason}", where=where) from error


def _parse(where: str, text: str) -> Header:
    raw = _encoded(text, where)
    try:
        content = json.loads(raw)
        ends = [entry["data_offsets"][1] for key, entry in content.items() if key != "__metadata__"]
        size = 8 + len(raw) + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(f"is not a safetensors header: {error}", where=where) from error
    return parse_header(raw, size, where)


def fits(origin: Origin, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether ``tensors`` (name to dtype label and shape) are exactly what the origin held."""
    held = {e.name: (e.dtype.label, e.shape) for header in origin.headers.values() for e in header.entries}
    return held == dict(tensors)
