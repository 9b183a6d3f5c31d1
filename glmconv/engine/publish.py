"""Where a conversion is staged, and the one rename that makes it appear.

A staging directory holds ``unit`` (what will be published), ``journal``, ``lock`` and, while an old
unit is being replaced, ``old``. Only ``unit`` is renamed into place.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glmconv.engine.files import storage_error, sync_directory
from glmconv.errors import StorageError, UsageError

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's own name for the file that says which unit to load."""

UNIT_MARKS = frozenset(
    {
        "glmconv.json",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        ".metadata",
        "metadata.json",
        "common.pt",
    }
)
"""One of these is in every checkpoint: a directory with none of them is never replaced."""

OVERWRITE_HINT = "use --overwrite to replace it, or choose another destination"


@dataclass(frozen=True, slots=True)
class Destination:
    """``staging`` is where the work happens; ``final`` is where its ``unit`` will appear."""

    dst: Path
    final: Path
    staging: Path


def unit_dir(staging: Path) -> Path:
    """What will be published."""
    return staging / "unit"


def journal_path(staging: Path) -> Path:
    return staging / "journal"


def destination(
    dst: Path, unit: str | None, *, sources: Sequence[Path] = (), overwrite: bool = False
) -> Destination:
    """Check a destination and create its staging directory.

    ``unit`` is the directory under ``dst`` that is published (``release``), or None when it is ``dst``
    itself. The staging directory is on the same filesystem as ``final``: inside ``dst`` when that is
    a directory and not the unit, else beside it.

    Raises UsageError when ``dst`` is, is in, or holds a source; StorageError when the unit exists
    (without ``overwrite``), cannot be replaced by one rename, or when nothing can be written there.
    """
    dst = Path(os.path.realpath(dst))
    for source in sources:
        _refuse_nesting(source, dst)
    final = dst if unit is None else dst / unit
    _check_directory(dst)
    check_final(final, overwrite)
    if unit is None and os.path.ismount(dst):
        raise StorageError(
            "the destination is a mount point, which no rename can replace",
            where=os.fspath(dst),
            hint="name a new directory inside it",
        )
    beside = dst.parent / f".{dst.name}.glmconv-{unit or 'hf'}.partial"
    inside = dst / f".glmconv-{unit}.partial"
    staging = beside if unit is None or not dst.is_dir() or beside.is_dir() else inside
    try:
        staging.mkdir(parents=True, exist_ok=True)
        _check_writable(staging)
    except OSError as error:
        raise storage_error(error, staging, "create the staging directory") from error
    return Destination(dst, final, staging)


def _check_directory(dst: Path) -> None:
    if os.path.lexists(dst) and not dst.is_dir():
        what = "the destination is not a directory"
        raise StorageError(what, where=os.fspath(dst), hint="choose another path")


def _check_writable(staging: Path) -> None:
    probe = staging / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
    probe.write_bytes(b"")
    probe.unlink()


def _refuse_nesting(source: Path, dst: Path) -> None:
    """Raise UsageError when one of the two is, or is inside, the other (links do not hide it)."""
    source = Path(os.path.realpath(source))
    where = os.fspath(dst)
    hint = "choose a destination outside of the source; a source is never written to"
    for ancestor in (dst, *dst.parents):
        if _same(ancestor, source):
            what = "the source itself" if ancestor == dst else f"inside the source {source}"
            raise UsageError(f"the destination is {what}", where=where, hint=hint)
    if any(_same(ancestor, dst) for ancestor in source.parents):
        raise UsageError(f"the source {source} is inside the destination", where=where, hint=hint)


def _same(left: Path, right: Path) -> bool:
    try:
        return os.path.samefile(left, right)
    except OSError:
        return left == right  # one of them does not exist (yet)


def check_final(final: Path, overwrite: bool) -> None:
    """Raise StorageError unless ``final`` is free, empty, or a checkpoint that may be overwritten."""
    try:
        names = {entry.name for entry in os.scandir(final)}
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, final, "look into the destination") from error
    if not names:
        return
    if not overwrite:
        raise StorageError("the destination exists already", where=os.fspath(final), hint=OVERWRITE_HINT)
    if not names & UNIT_MARKS and not any(name.endswith((".safetensors", ".distcp")) for name in names):
        raise StorageError(
            "the destination does not look like a checkpoint, so --overwrite does not replace it",
            where=os.fspath(final),
            hint="remove it yourself, or choose another destination",
        )


def require_space(path: Path, need: int) -> None:
    """Raise StorageError unless ``need`` bytes are free at ``path`` (or its nearest existing parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise storage_error(error, path, "ask for free space") from error
    free = stat.f_bavail * stat.f_frsize
    if free < need:
        raise StorageError(
            f"{need:,} bytes are needed and {free:,} are free",
            where=os.fspath(path),
            hint=f"free {need - free:,} bytes or choose a destination on another filesystem",
        )


def publish(staging: Path, final: Path, *, overwrite: bool = False) -> None:
    """Make the unit durable and rename it to ``final``; then remove the staging directory.

    The caller still holds the staging lock. An old unit is moved aside first and removed after, so
    it goes only when the new one is in its place. Raises StorageError; nothing is lost then, and
    the same call can be made again.
    """
    unit, old = unit_dir(staging), staging / "old"
    check_final(final, overwrite)
    _sync_tree(unit)
    try:
        if not final.parent.is_dir():
            final.parent.mkdir(parents=True)
            sync_directory(final.parent.parent)
        if final.is_dir() and any(final.iterdir()):
            if old.exists():
                shutil.rmtree(old)
            final.rename(old)
        unit.rename(final)
    except OSError as error:
        raise storage_error(error, final, "publish") from error
    sync_directory(final.parent)
    discard(staging)


def _sync_tree(root: Path) -> None:
    """Flush every file and directory under ``root``."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise storage_error(error, path, "flush") from error
        sync_directory(directory)


def discard(staging: Path) -> None:
    """Remove a staging directory and everything in it."""
    try:
        shutil.rmtree(staging)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, staging, "remove the staging directory") from error


def write_tracker(root: Path, text: str) -> None:
    """Replace the tracker file of ``root`` atomically. StorageError on failure."""
    write_atomically(root / TRACKER, text.encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the whole new one. StorageError on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise storage_error(error, path, "write") from error
    sync_directory(path.parent)
