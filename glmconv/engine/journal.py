"""The journal: which slots of which target files are finished and on disk.

One line a record, each with its own checksum, so that a torn or damaged one is told from a whole
one. The first line is the header: format, run, plan digest, hash mode and the identity of every
source, in order. Records are appended after their data is on disk, never before.

Each holder of the staging directory takes the next *fence*, a number that stands in all its records.
A holder that lost the directory while it was asleep may still append: its records are older by
their fence than those of the holder after it, and are not believed.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from glmconv.basics.errors import DataError, StorageError
from glmconv.engine.files import OpenTarget, sync_directory
from glmconv.engine.rounding import SlotCount
from glmconv.plan.plan import PLAN_FORMAT, Plan
from glmconv.storage.errors import storage_error
from glmconv.storage.objects import StorageObject

JOURNAL = "journal"
RESTART_HINT = "--overwrite discards it and starts again, another destination leaves it alone"


@dataclass(frozen=True, slots=True)
class Finished:
    """Slots ``first`` to ``end`` of target number ``target``, with their leaf digests (16 bytes each).

    ``rounded`` tells what casts lost, slot by slot, where they lost something.
    """

    target: int
    first: int
    end: int
    digests: bytes = b""
    rounded: tuple[SlotCount, ...] = ()


@dataclass(slots=True)
class Found:
    """What an earlier run left: finished slots, and the numbers of the conditions that held."""

    finished: list[Finished] = field(default_factory=list)
    held: set[int] = field(default_factory=set)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()  # ASCII: paths need not be Unicode
    return b"%s %s\n" % (xxhash.xxh3_64(text).hexdigest().encode(), text)


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """Whole records in order; damaged ones are passed over."""
    for line in data.split(b"\n"):
        digest, _, text = line.partition(b" ")
        if digest == xxhash.xxh3_64(text).hexdigest().encode():
            yield json.loads(text)


def _header(plan: Plan, hash_mode: str) -> dict[str, Any]:
    return {
        "format": PLAN_FORMAT,
        "plan": plan.digest,
        "hash": hash_mode,
        "asked": plan.asked,
        "sources": [source.identity for source in plan.sources],
    }


_SAID = {"mtime_ns": "modification time", "ctime_ns": "time of change"}


def _refuse_mismatch(found: dict[str, Any], wanted: dict[str, Any], plan: Plan, path: Path) -> None:
    """Raise when an earlier run was another one: by format, sources, plan or hash mode."""
    where = os.fspath(path)
    if found.get("format") != wanted["format"]:
        raise StorageError(
            "the unfinished run here was made by another version of glmconv", where=where, hint=RESTART_HINT
        )
    _refuse_other_options(found["asked"], wanted["asked"], where)
    _refuse_other_sources(found["sources"], plan.sources, where)
    if found["plan"] != wanted["plan"]:
        raise StorageError(
            "the unfinished run here is another conversion: what it writes beside the weights differs "
            "(config.json, for instance)",
            where=where,
            hint=f"the command that began it resumes it; {RESTART_HINT}",
        )
    if found["hash"] != wanted["hash"]:
        raise StorageError(
            f"the unfinished run here was started with --hash {found['hash']}",
            where=where,
            hint=f"run with --hash {found['hash']} to resume; {RESTART_HINT}",
        )


def _refuse_other_options(before: dict[str, str], now: dict[str, str], where: str) -> None:
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if names:
        apart = [
            f"{name} {before.get(name, '(left out)')} there, {now.get(name, '(left out)')} here"
            for name in names
        ]
        raise StorageError(
            f"the unfinished run here was asked for otherwise: {'; '.join(apart)}",
            where=where,
            hint=f"the command that began it resumes it; {RESTART_HINT}",
        )


def _refuse_other_sources(before: list[list[Any]], now: list[StorageObject], where: str) -> None:
    """Name the first source that is another object than the unfinished run's."""
    for old, wanted in zip(before, now, strict=False):
        new = wanted.identity
        if old == new:
            continue
        if old[0] != new[0]:
            raise StorageError(
                f"the unfinished run here reads {old[0]}, this one {new[0]}: bytes of two checkpoints "
                "are never mixed",
                where=where,
                hint=f"the command that began it resumes it; {RESTART_HINT}",
            )
        names = [_SAID.get(name, name) for name in wanted.named_identity]
        what = next((name for name, a, b in zip(names, old, new, strict=False) if a != b), "identity")
        raise DataError(
            f"the source changed since the unfinished run here: the {what} of {new[0]} differs",
            where=where,
            hint=RESTART_HINT,
        )
    if len(before) != len(now):
        raise StorageError(
            f"the unfinished run here reads {len(before)} files, this one {len(now)}: another conversion",
            where=where,
            hint=f"the command that began it resumes it; {RESTART_HINT}",
        )


class Journal:
    """The open journal of one run. Use :func:`open_journal`.

    ``run`` names the run in journal and manifest. ``guard`` is called before anything is written
    and raises where this process no longer holds the staging directory.
    """

    def __init__(self, path: Path, fd: int, run: str, fence: int, guard: Callable[[], None]) -> None:
        self._target = OpenTarget(fd, os.fspath(path))
        self.run = run
        self._fence = fence
        self._guard = guard

    def begin(self, plan: Plan, hash_mode: str) -> None:
        """Write the header of a new run. The unit must be empty by then: from here on it is trusted."""
        self._write(_line({**_header(plan, hash_mode), "run": self.run}))
        sync_directory(os.path.dirname(self._target.path))

    def append(self, finished: Iterable[Finished], held: Iterable[int] = ()) -> None:
        """Record finished slots and conditions that held; the data must be on disk. Durable on return."""
        lines = [
            {
                "t": f.target,
                "s": f.first,
                "e": f.end,
                "h": base64.b64encode(f.digests).decode(),
                "r": f.rounded,
            }
            for f in finished
        ]
        lines += [{"held": index} for index in held]
        self._write(b"".join(_line({**line, "f": self._fence}) for line in lines))

    def forget(self, target: int) -> None:
        """Take back all that was recorded of a target file, which will be written anew."""
        self._write(_line({"forget": target, "f": self._fence}))

    def _write(self, data: bytes) -> None:
        self._guard()
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._target.fd, left) :]
            os.fdatasync(self._target.fd)
        except OSError as error:
            raise storage_error(error, self._target.path, "write the journal") from error

    def close(self) -> None:
        """StorageError on failure; what was appended is on disk all the same."""
        try:
            os.close(self._target.fd)
        except OSError as error:
            raise storage_error(error, self._target.path, "close the journal") from error


def open_journal(
    path: Path, plan: Plan, hash_mode: str, guard: Callable[[], None] = lambda: None
) -> tuple[Journal, Found | None]:
    """Open or create the journal at ``path`` for ``plan``.

    Returns what an earlier run of the same plan finished, or None when there was none (no journal,
    or one that was killed before its header was whole): the caller then clears the unit and calls
    :meth:`Journal.begin`. Raises DataError when the sources changed since, StorageError when the
    journal is another run's.
    """
    try:
        # Appending: what a holder that was asleep writes late can never cover another's records.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, path, "open the journal") from error
    try:
        data = _content(path, fd)
        header = next(_records(data), None)
        if header is None or "plan" not in header:
            guard()
            os.ftruncate(fd, 0)
            return Journal(path, fd, secrets.token_hex(8), 0, guard), None
        _refuse_mismatch(header, _header(plan, hash_mode), plan, path)
        found, fence = _believed(data)
        journal = Journal(path, fd, str(header["run"]), fence + 1, guard)
        torn = b"" if data.endswith(b"\n") else b"\n"
        journal._write(torn + _line({"fence": fence + 1, "f": fence + 1}))
        return journal, found
    except OSError as error:
        os.close(fd)
        raise storage_error(error, path, "open the journal") from error
    except BaseException:
        os.close(fd)
        raise


def _content(path: Path, fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        return file.read()


def _believed(data: bytes) -> tuple[Found, int]:
    """What the records tell, late ones of an earlier holder left out; and the latest fence."""
    found, fence = Found(), 0
    for record in islice(_records(data), 1, None):
        if record["f"] < fence:
            continue
        fence = record["f"]
        if "held" in record:
            found.held.add(record["held"])
        elif "forget" in record:
            found.finished = [done for done in found.finished if done.target != record["forget"]]
        elif "t" in record:
            digests = base64.b64decode(record["h"])
            rounded = tuple((slot, zero, small) for slot, zero, small in record["r"])
            found.finished.append(Finished(record["t"], record["s"], record["e"], digests, rounded))
    return found, fence


def read_header(path: Path) -> dict[str, Any]:
    """The header of a journal, empty where there is none that is whole. Raises StorageError."""
    try:
        with path.open("rb") as file:
            return next(_records(file.readline()), {})
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise storage_error(error, path, "read the journal") from error
