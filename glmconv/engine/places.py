"""Where a conversion is staged and where its unit appears; what stands in the way is refused here.

A staging directory holds ``unit`` (what will be published), ``journal``, ``lock`` and, after the
rename, ``published`` and what the new unit replaced. Only ``unit`` is renamed into place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glmconv.basics.errors import Defect, StorageError, UsageError
from glmconv.engine.files import make_directories
from glmconv.storage.errors import storage_error

OVERWRITE_HINT = "use --overwrite to replace it, or choose another destination"

Foreign = Callable[[Path], Sequence[Path]]
"""Tells what in a directory is not a checkpoint's own, as paths relative to it."""


@dataclass(frozen=True, slots=True)
class Destination:
    """``staging`` is where the work happens; ``final`` is where its ``unit`` will appear.

    ``foreign`` says what in an existing unit must not be removed with it.
    """

    dst: Path
    final: Path
    staging: Path
    overwrite: bool
    foreign: Foreign

    def check_final(self) -> None:
        """Raise StorageError unless ``final`` is free, empty, or a checkpoint that may be replaced."""
        try:
            empty = next(os.scandir(self.final), None) is None
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, self.final, "look into the destination") from error
        if empty:
            return
        where = os.fspath(self.final)
        if os.path.islink(self.final):
            raise StorageError(
                f"the destination is a link, to {os.path.realpath(self.final)}",
                where=where,
                hint="name the directory itself, or remove the link",
            )
        if not self.overwrite:
            raise StorageError("the destination exists already", where=where, hint=OVERWRITE_HINT)
        found = self.foreign(self.final)
        if found:
            raise StorageError(
                f"the destination holds {len(found)} files that are not a checkpoint's own, so --overwrite "
                "does not replace it",
                where=where,
                defects=[Defect("foreign", "not a checkpoint's own", str(path)) for path in found],
                hint="move them away yourself, or choose another destination",
            )

    def prepare(self) -> None:
        """Create the staging directory and try to write there. Raises StorageError."""
        try:
            make_directories(self.staging)
            probe = self.staging / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise storage_error(error, self.staging, "create the staging directory") from error


def unit_dir(staging: Path) -> Path:
    """What will be published."""
    return staging / "unit"


def destination(
    dst: Path,
    unit: str | None,
    *,
    sources: Sequence[Path] = (),
    files: Iterable[Path] = (),
    overwrite: bool = False,
    foreign: Foreign = lambda path: [path],
) -> Destination:
    """Where the result of a conversion to ``dst`` belongs. Nothing is created or removed.

    ``unit`` is the directory under ``dst`` that is published (``release``), or None when it is ``dst``
    itself. The staging directory is on the same filesystem as ``final``: inside ``dst`` when that is
    a directory and not the unit, else beside it.

    ``sources`` are directories, ``files`` the real paths of what is read (a source may be a directory
    of links). Raises UsageError when ``dst`` is, is in, or holds a source; StorageError when it is a file, or
    cannot be replaced by one rename.
    """
    dst = Path(os.path.realpath(dst))
    for source in sources:
        _refuse_nesting(source, dst)
    for folder in sorted({file.parent for file in files}):
        if _holds(dst, folder):
            raise UsageError(
                f"files of the source lie inside the destination, in {folder} (the source links to them)",
                where=os.fspath(dst),
                hint="choose another destination: a source is never written to",
            )
    if os.path.lexists(dst) and not dst.is_dir():
        what = "the destination is not a directory"
        raise StorageError(what, where=os.fspath(dst), hint="choose another path")
    if unit is None and os.path.ismount(dst):
        raise StorageError(
            "the destination is a mount point, which no rename can replace",
            where=os.fspath(dst),
            hint="name a new directory inside it",
        )
    beside = dst.parent / f".{dst.name}.glmconv-{unit or 'hf'}.partial"
    inside = dst / f".glmconv-{unit}.partial"
    staging = beside if unit is None or not dst.is_dir() or beside.is_dir() else inside
    return Destination(dst, dst if unit is None else dst / unit, staging, overwrite, foreign)


def _refuse_nesting(source: Path, dst: Path) -> None:
    """Raise UsageError when one of the two is, or is inside, the other (links do not hide it)."""
    source = Path(os.path.realpath(source))
    where = os.fspath(dst)
    hint = "choose a destination outside of the source; a source is never written to"
    for ancestor in (dst, *dst.parents):
        if _same(ancestor, source):
            what = "the source itself" if ancestor == dst else f"inside the source {source}"
            raise UsageError(f"the destination is {what}", where=where, hint=hint)
    if _holds(dst, source):
        raise UsageError(f"the source {source} is inside the destination", where=where, hint=hint)


def _holds(folder: Path, path: Path) -> bool:
    """Whether ``path`` is ``folder`` or lies anywhere in it."""
    return any(_same(ancestor, folder) for ancestor in (path, *path.parents))


def _same(left: Path, right: Path) -> bool:
    try:
        return os.path.samefile(left, right)
    except OSError:
        return left == right  # one of them does not exist (yet)


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
