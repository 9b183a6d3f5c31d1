"""Read JSON files that come from anywhere: in bounded memory, and only what means one thing."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from glmconv.basics.errors import DataError, Defect, StorageError

MAX_CONFIG = 16 << 20
"""Bytes of a config; released ones have a few thousand."""

MAX_INDEX = 64 << 20
"""Bytes of an index of shards; 60,000 tensors take about 6 MB."""

MAX_RECORD = 512 << 20
"""Bytes of a record that glmconv wrote itself: a line or a hash for each tensor and block."""

MAX_NESTING = 64
"""Levels of objects and lists in a JSON file; configs have a handful."""


def read_bounded(path: Path, most: int) -> bytes:
    """Bytes of a regular file of at most ``most`` bytes.

    Raises StorageError for what cannot be read, DataError for another kind of file or a larger one.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is not a regular file", where=str(path))
        with path.open("rb") as stream:
            data = stream.read(most + 1) if status.st_size <= most else b""
    except OSError as error:
        raise StorageError(
            f"cannot read: {error.strerror}", where=str(path), hint="name the directory of a checkpoint"
        ) from error
    size = max(status.st_size, len(data))
    if size > most:
        raise DataError(
            f"is {size:,} bytes long; such a file has at most {most:,}",
            where=str(path),
            hint="is it another file under this name? glmconv does not read it",
        )
    return data


def read_json(path: Path, most: int = MAX_CONFIG) -> dict[str, Any]:
    """A JSON object from a file of at most ``most`` bytes. Raises StorageError or DataError naming it."""
    return parse_json(read_bounded(path, most), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, no key of which stands twice. Raises DataError naming ``where``."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return content

    try:
        content = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where) from error
    if not isinstance(content, dict):
        raise DataError("not a JSON object", where=where)
    if twice:
        raise DataError(
            "the same key stands twice in one object",
            where=where,
            defects=[Defect("duplicate", "stands twice", name) for name in twice],
        )
    if _nests_deeply(content):
        raise DataError(f"nests deeper than {MAX_NESTING} levels", where=where)
    return content


def _nests_deeply(content: dict[str, Any]) -> bool:
    """Whether something that walks the tree by recursion might not reach its leaves."""
    level: list[Any] = [content]
    for _ in range(MAX_NESTING):
        values = (
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
        )
        level = [inner for inner in values if isinstance(inner, (dict, list))]
    return bool(level)
