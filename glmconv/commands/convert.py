"""The straight line: open, understand, plan, prove, move, publish, report."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmconv.basics.errors import DataError, Defect, GlmconvError, StorageError, UsageError
from glmconv.basics.memory import no_collection, peak_rss_anon
from glmconv.commands.conversion_report import Report, make_manifest, make_report, rounding_warnings, steps_of
from glmconv.engine import (
    TRACKER,
    CopyMode,
    Destination,
    HashMode,
    Progress,
    StagingLock,
    State,
    Stop,
    check_conditions,
    clean_up,
    destination,
    execute,
    is_of,
    publish,
    read_tracker,
    recognise,
    reopen,
    require_space,
    restore_old,
    set_tracker,
    space_needed,
    space_taken,
    unit_dir,
    write_atomically,
)
from glmconv.engine.journal import JOURNAL
from glmconv.engine.publishing import PUBLISHED
from glmconv.engine.rounding import summary
from glmconv.plan.planner import Planned, TargetOptions, make_plan
from glmconv.plan.side_files import foreign_in_unit
from glmconv.source.manifest import FILE as MANIFEST_FILE
from glmconv.source.manifest import read_manifest
from glmconv.source.open import local_path, open_source
from glmconv.source.source import SourceOptions
from glmconv.source.torchdist.location import BRIDGE_TRACKER
from glmconv.storage.errors import storage_error

HELD_OPEN = (errno.EBUSY, errno.ENOTEMPTY)
"""What removing a directory says where a network filesystem keeps files that are still open elsewhere."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to carry a plan out; none of it changes a byte of the unit.

    ``set_tracker`` lets the tracker of a torch_dist root name the new unit whatever it named before.
    """

    workers: int = 2
    copy_mode: CopyMode = "auto"
    hash_mode: HashMode = "full"
    overwrite: bool = False
    set_tracker: bool = False
    dry_run: bool = False
    journal_bytes: int = 256 << 20


def plan_conversion(
    src: Path, source: SourceOptions | None = None, target: TargetOptions | None = None
) -> Planned:
    """Open a checkpoint, plan its conversion and prove the plan; nothing is written.

    Raises StorageError, DataError with every defect at once, or UsageError.
    """
    options = source or SourceOptions()
    with no_collection():
        return make_plan(open_source(src, options), options, target or TargetOptions())


def convert(
    src: Path,
    dst: Path,
    *,
    source: SourceOptions | None = None,
    target: TargetOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Stop | None = None,
) -> Report:
    """Convert the checkpoint at ``src`` and publish the result at ``dst``.

    ``dst`` is the root of a torch_dist (its unit ``release`` or ``iter_NNNNNNN`` appears inside), or
    the HF directory itself. The same call after an interruption resumes. Raises a GlmconvError;
    nothing is at ``dst`` then, and ``src`` is never written to.
    """
    began = time.monotonic()
    src, dst, run, stop = Path(src), Path(dst), run or RunOptions(), stop or Stop()
    local_path(dst)
    planned = plan_conversion(src, source, target)
    if run.set_tracker and planned.unit is None:
        raise UsageError("--set-tracker is for --to megatron", hint="an HF directory has no tracker")
    report = make_report(planned, src, dst, time.monotonic() - began)
    fill = source.fill_missing_from if source else None
    if run.dry_run:
        _look_ahead(planned, dst, fill, run, report)
    else:
        place = _place(planned, dst, fill, run)
        with stop.defer():
            _carry_out(planned, place, run, report, began, progress, stop)
    report.seconds = time.monotonic() - began
    report.peak_rss_anon = peak_rss_anon()
    return report


def _place(planned: Planned, dst: Path, fill: Path | None, run: RunOptions) -> Destination:
    sources = [path for path in (planned.source.path, planned.source.hf_dir, fill) if path is not None]
    return destination(
        dst,
        planned.unit,
        sources=sources,
        files=(Path(file.address) for file in planned.plan.sources if file.storage == "local"),
        overwrite=run.overwrite,
        foreign=foreign_in_unit,
    )


def _look_ahead(planned: Planned, dst: Path, fill: Path | None, run: RunOptions, report: Report) -> None:
    """Find what a run would find, and say what is left to it. Raises DataError for what the data lack."""
    check_conditions(planned.plan)
    try:
        place = _place(planned, dst, fill, run)
        if _state(place, planned, run.hash_mode) is State.OPEN:
            place.check_final()
    except (StorageError, UsageError) as error:
        report.warnings.append(Defect("destination", error.what, error.where, error.hint, "warning"))
    report.not_looked_at.append("free space at the destination")
    if planned.ledger.computed_bytes:
        report.not_looked_at.append("whether all values fit the dtype that they are cast to, or become zero")


def _carry_out(
    planned: Planned,
    place: Destination,
    run: RunOptions,
    report: Report,
    began: float,
    progress: Callable[[Progress], None] | None,
    stop: Stop,
) -> None:
    """From a plan to its published unit, whatever an earlier run left (``docs/publishing.md``)."""
    if _state(place, planned, run.hash_mode) is State.OPEN:
        place.check_final()
        absent = _absent_parents(place.staging)
    else:
        absent = []
    try:
        place.prepare()
        with StagingLock(place.staging) as lock:
            # Looked at again: another run may have ended while this one waited for the lock.
            if _state(place, planned, run.hash_mode) is State.PUBLISHED:
                report.finished_earlier = True
                _tell_rounding(report, (read_manifest(place.final / MANIFEST_FILE) or {}).get("rounding", {}))
            else:
                restore_old(place)
                staged = read_manifest(unit_dir(place.staging) / MANIFEST_FILE)
                reopen(place, None if staged is None else staged.get("run"))
                with _kept_to_resume(place, lock):
                    place.check_final()
                    _make(planned, place, run, report, began, progress, stop, lock)
            _finish(planned, place, run, report, lock)
    except (GlmconvError, OSError) as error:
        for parent in absent:
            with suppress(OSError):  # it is not empty: the journal lies in it, or another run's
                parent.rmdir()
        if isinstance(error, OSError):
            where = error.filename if isinstance(error.filename, str) else place.staging
            raise storage_error(error, where, "carry out the conversion") from error
        raise


def _make(
    planned: Planned,
    place: Destination,
    run: RunOptions,
    report: Report,
    began: float,
    progress: Callable[[Progress], None] | None,
    stop: Stop,
    lock: StagingLock,
) -> None:
    """Fill the unit, leave the manifest in it, put it in place."""
    _require_space(planned, place, run)
    report.outcome = execute(
        planned.plan,
        place.staging,
        workers=run.workers,
        copy_mode=run.copy_mode,
        hash_mode=run.hash_mode,
        progress=progress,
        stop=stop,
        journal_bytes=run.journal_bytes,
        restart=run.overwrite,
        guard=lock.check,
    )
    report.steps = steps_of(report.outcome)
    _tell_rounding(report, summary(report.outcome.rounding))
    report.seconds = time.monotonic() - began
    report.peak_rss_anon = peak_rss_anon()
    # ASCII, since names of files and directories need not be Unicode.
    manifest = json.dumps(make_manifest(planned, report), indent=1).encode()
    lock.check()
    write_atomically(unit_dir(place.staging) / MANIFEST_FILE, manifest, place.staging / "manifest")
    publish(place, guard=lock.check, stop=stop)


def _tell_rounding(report: Report, rounding: dict[str, Any]) -> None:
    """What casts lost, in the report and as a warning."""
    report.rounding = rounding
    report.warnings += rounding_warnings(rounding)


def _finish(planned: Planned, place: Destination, run: RunOptions, report: Report, lock: StagingLock) -> None:
    """The tracker, then the staging directory goes; what somebody still holds open there is said, no more."""
    lock.check()
    if planned.unit is not None:
        _track(planned, place, run, report)
    lock.check()
    try:
        clean_up(place.staging)
    except StorageError as error:
        error.what = f"the result is complete and in place, but {error.what}"
        error.hint = "run the same command again: it removes what is left"
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in HELD_OPEN):
            raise
        report.warnings.append(Defect("left-over", error.what, error.where, error.hint, "warning"))
    else:
        lock.remove_with_directory()


def _track(planned: Planned, place: Destination, run: RunOptions, report: Report) -> None:
    unit = "release" if planned.unit == "release" else str(planned.options.iteration)
    tracked = set_tracker(place.dst, unit, place.staging, force=run.set_tracker)
    if not tracked.moved:
        report.warnings.append(
            Defect(
                "tracker",
                f"names {tracked.kept!r} and is kept: trainers go on loading that, not {planned.unit}",
                str(place.dst / TRACKER),
                "--set-tracker moves it",
                "warning",
            )
        )
    if (place.dst / BRIDGE_TRACKER).exists():
        report.warnings.append(
            Defect(
                "tracker",
                "Megatron-Bridge reads it before all others, and it names a run of its own",
                str(place.dst / BRIDGE_TRACKER),
                f"name {place.final} itself where Megatron-Bridge shall load it",
                "warning",
            )
        )


def _state(place: Destination, planned: Planned, hash_mode: HashMode) -> State:
    """What an earlier run of this very plan left; a unit of it without any tracker counts as unfinished."""
    if os.path.islink(place.final):  # what it leads to was not put there by a run
        return State.OPEN
    manifest = read_manifest(place.final / MANIFEST_FILE)
    plan = planned.plan.digest
    state = recognise(place, plan, hash_mode, manifest)
    untracked = planned.unit is not None and not place.overwrite and not place.staging.exists()
    if state is State.OPEN and untracked and manifest is not None and is_of(manifest, plan, hash_mode):
        return State.PUBLISHED if read_tracker(place.dst / TRACKER) is None else state
    return state


def _absent_parents(path: Path) -> list[Path]:
    """Directories above a path that are still to be made, the deepest first."""
    return [parent for parent in path.parents if not os.path.lexists(parent)]


@contextmanager
def _kept_to_resume(place: Destination, lock: StagingLock) -> Iterator[None]:
    """Remove the staging directory where a run fails that leaves nothing to resume.

    That is a run that began here and found the data wrong, or one that failed before its journal
    was there. What an earlier run left is kept.
    """
    journal = place.staging / JOURNAL
    published = place.staging / PUBLISHED
    began_earlier = journal.exists()
    try:
        yield
    except GlmconvError as error:
        began = journal.exists() and not isinstance(error, DataError)
        resumable = began_earlier or began or published.exists()
        if not resumable:
            lock.check()
            clean_up(place.staging, keep="")
            lock.remove_with_directory()
        raise


def _require_space(planned: Planned, place: Destination, run: RunOptions) -> None:
    """Preflight of the disk; what an earlier run already wrote counts as there.

    StorageError where space is short, or where ``clone`` is asked for and impossible.
    """
    need = space_needed(planned.plan, place.staging, run.copy_mode)
    require_space(place.staging, max(0, need - space_taken(place.staging)))
