"""The journal: which slots of which target files are finished and on disk.

One line a record, each with its own checksum, so that a torn tail is told from a whole record. The
first line is the header: format, plan digest, hash mode and the identity of every source. Records
are appended after their data is on disk, never before.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from glmconv.engine.files import OpenTarget, storage_error, sync_directory, write_all
from glmconv.errors import DataError, StorageError
from glmconv.plan import Plan

FORMAT = 1
RESTART_HINT = "run with --overwrite to start again, or delete the staging directory"


@dataclass(frozen=True, slots=True)
class Finished:
    """Slots ``first`` to ``end`` of target number ``target``, with their leaf digests (16 bytes each)."""

    target: int
    first: int
    end: int
    digests: bytes = b""


@dataclass(slots=True)
class Found:
    """What an earlier run left: finished slots, and the numbers of the pairs that compared equal."""

    finished: list[Finished] = field(default_factory=list)
    equal: set[int] = field(default_factory=set)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()  # ASCII: paths need not be Unicode
    return b"%s %s\n" % (xxhash.xxh3_64(text).hexdigest().encode(), text)


def _records(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole records in order, each with the offset behind it; ends at the first damaged one."""
    at = 0
    while (stop := data.find(b"\n", at)) >= 0:
        digest, _, text = data[at:stop].partition(b" ")
        if digest != xxhash.xxh3_64(text).hexdigest().encode():
            return
        at = stop + 1
        yield json.loads(text), at


def _header(plan: Plan, hash_mode: str) -> dict[str, Any]:
    sources = [[s.path, s.size, s.mtime_ns, s.header_digest] for s in plan.sources]
    return {"format": FORMAT, "plan": plan.digest, "hash": hash_mode, "sources": sources}


def _refuse_mismatch(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Raise when an earlier run was another one: by format, sources, plan or hash mode."""
    where = os.fspath(path)
    if found.get("format") != wanted["format"]:
        raise StorageError(
            "the unfinished run here was made by another version of glmconv", where=where, hint=RESTART_HINT
        )
    before = {entry[0]: entry for entry in found["sources"]}
    for entry in wanted["sources"]:
        old = before.get(entry[0])
        if old is not None and old != entry:
            what = "size" if old[1] != entry[1] else "modification time" if old[2] != entry[2] else "header"
            raise DataError(
                f"the source changed since the unfinished run here: the {what} of {entry[0]} differs",
                where=where,
                hint=RESTART_HINT,
            )
    if found["plan"] != wanted["plan"] or len(before) != len(wanted["sources"]):
        raise StorageError(
            "the unfinished run here is another conversion (its plan differs)", where=where, hint=RESTART_HINT
        )
    if found["hash"] != wanted["hash"]:
        raise StorageError(
            f"the unfinished run here was started with --hash {found['hash']}",
            where=where,
            hint=f"run with --hash {found['hash']} to resume; {RESTART_HINT}",
        )


class Journal:
    """The open journal of one run. Use :func:`open_journal`."""

    def __init__(self, path: Path, fd: int, end: int) -> None:
        self._target = OpenTarget(fd, os.fspath(path))
        self._end = end

    def begin(self, plan: Plan, hash_mode: str) -> None:
        """Write the header of a new run. The unit must be empty by then: from here on it is trusted."""
        self._write(_line(_header(plan, hash_mode)))
        sync_directory(os.path.dirname(self._target.path))

    def append(self, finished: Iterable[Finished], equal: Iterable[int] = ()) -> None:
        """Record finished slots and equal pairs; their data must be on disk already. Durable on return."""
        lines = [
            _line({"t": f.target, "s": f.first, "e": f.end, "h": base64.b64encode(f.digests).decode()})
            for f in finished
        ]
        lines += [_line({"equal": index}) for index in equal]
        self._write(b"".join(lines))

    def _write(self, data: bytes) -> None:
        write_all(self._target, memoryview(data), self._end)
        self._end += len(data)
        try:
            os.fdatasync(self._target.fd)
        except OSError as error:
            raise storage_error(error, self._target.path, "flush the journal") from error

    def close(self) -> None:
        os.close(self._target.fd)


def open_journal(path: Path, plan: Plan, hash_mode: str) -> tuple[Journal, Found | None]:
    """Open or create the journal at ``path`` for ``plan``.

    Returns what an earlier run of the same plan finished, or None when there was none (no journal,
    or one that was killed before its header was whole): the caller then clears the unit and calls
    :meth:`Journal.begin`. Raises DataError when the sources changed since, StorageError when the
    journal is another plan's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, path, "open the journal") from error
    try:
        found, end = _read(path, fd, plan, hash_mode)
        os.ftruncate(fd, end)
        return Journal(path, fd, end), found
    except BaseException:
        os.close(fd)
        raise


def _read(path: Path, fd: int, plan: Plan, hash_mode: str) -> tuple[Found | None, int]:
    """What the journal tells, and where its whole records end."""
    with open(fd, "rb", closefd=False) as file:
        data = file.read()
    found: Found | None = None
    end = 0
    for record, behind in _records(data):
        if found is None:
            _refuse_mismatch(record, _header(plan, hash_mode), path)
            found = Found()
        elif "equal" in record:
            found.equal.add(record["equal"])
        else:
            digests = base64.b64decode(record["h"])
            found.finished.append(Finished(record["t"], record["s"], record["e"], digests))
        end = behind
    return found, end
