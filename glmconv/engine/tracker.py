"""The tracker of a torch_dist root: which unit trainers load, and when a conversion may move it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from glmconv.engine.publishing import write_atomically
from glmconv.storage.errors import storage_error

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's own name for the file that says which unit to load."""

MAX_TRACKER = 64
"""Bytes that are read of a tracker; a longer one is no number."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """``moved``: the tracker names the new unit now. ``kept`` is what it names otherwise."""

    moved: bool
    kept: str = ""


def set_tracker(root: Path, unit: str, staging: Path, *, force: bool = False) -> Tracked:
    """Let the tracker of ``root`` name ``unit`` (``release`` or a number), unless training would go back.

    An absent tracker is written, one that names an older iteration is moved. Where it names anything
    else (a newer iteration, a release beside iterations, what nobody can read), somebody's run stands
    there: it is kept, unless ``force``. ``staging`` is on the same filesystem. StorageError on failure.
    """
    path = root / TRACKER
    current = read_tracker(path)
    if current == unit:
        return Tracked(moved=True)
    if current is not None and not force and not _is_older(current, unit):
        return Tracked(moved=False, kept=current)
    write_atomically(path, unit.encode(), staging / "tracker")
    return Tracked(moved=True)


def read_tracker(path: Path) -> str | None:
    """What a tracker says, cut after 64 bytes; None where there is none. StorageError on failure."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path, "read the tracker") from error
    try:
        return os.read(fd, MAX_TRACKER).decode("ascii", "backslashreplace").strip()
    except OSError as error:
        raise storage_error(error, path, "read the tracker") from error
    finally:
        os.close(fd)


def _is_older(current: str, unit: str) -> bool:
    numbers = current.isdigit() and unit.isdigit()
    return numbers and int(current) < int(unit)
