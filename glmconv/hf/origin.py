"""How an HF checkpoint was cut into shards, kept so that it can be written again byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glmconv.errors import DataError
from glmconv.hf.header import Header, parse_header
from glmconv.hf.reader import HfCheckpoint, plain_name, read_json

FILE = "glmconv-origin.json"
"""Name of the record beside the HF side files of a torch_dist that glmconv wrote."""


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
        content = read_json(path)
        shards, index = content.get("shards"), content.get("index")
        if not isinstance(shards, dict) or not all(isinstance(text, str) for text in shards.values()):
            raise DataError("is not a record of shards", where=str(path))
        if not all(plain_name(name) for name in shards):
            raise DataError("names shards outside the checkpoint's directory", where=str(path))
        if index is not None and not isinstance(index, str):
            raise DataError("its index is not text", where=str(path))
        headers = {name: _parse(name, text) for name, text in shards.items()}
        return cls(headers, None if index is None else index.encode())

    def names(self) -> set[str]:
        """All tensors that the origin held."""
        return {entry.name for header in self.headers.values() for entry in header.entries}


def _parse(name: str, text: str) -> Header:
    raw = text.encode()
    try:
        content = json.loads(raw)
        ends = [entry["data_offsets"][1] for key, entry in content.items() if key != "__metadata__"]
        size = 8 + len(raw) + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DataError(f"is not a safetensors header: {error}", where=name) from error
    return parse_header(raw, size, name)


def fits(origin: Origin, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
    """Whether ``tensors`` (name to dtype label and shape) are exactly what the origin held."""
    held = {e.name: (e.dtype.label, e.shape) for header in origin.headers.values() for e in header.entries}
    return held == dict(tensors)
