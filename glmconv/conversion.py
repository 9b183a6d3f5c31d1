"""The straight line: open, understand, plan, prove, move, publish, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from glmconv.engine import (
    CopyMode,
    Destination,
    HashMode,
    Progress,
    StagingLock,
    Stop,
    destination,
    discard,
    execute,
    publish,
    require_space,
    space_needed,
    unit_dir,
    write_atomically,
    write_tracker,
)
from glmconv.engine.publish import TRACKER, journal_path
from glmconv.errors import DataError, GlmconvError
from glmconv.manifest import FILE as MANIFEST_FILE
from glmconv.manifest import read_manifest
from glmconv.memory import no_collection, peak_rss_anon
from glmconv.opening import local_path, open_source
from glmconv.planner import Planned, TargetOptions, make_plan
from glmconv.report import Report, make_manifest, make_report, steps_of
from glmconv.sources import SourceOptions


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to carry a plan out; none of it changes a byte of the output."""

    workers: int = 2
    copy_mode: CopyMode = "auto"
    hash_mode: HashMode = "full"
    overwrite: bool = False
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
    src, dst, run = Path(src), Path(dst), run or RunOptions()
    local_path(dst)
    planned = plan_conversion(src, source, target)
    report = make_report(planned, src, dst, time.monotonic() - began)
    if run.dry_run:
        report.seconds = time.monotonic() - began
        report.peak_rss_anon = peak_rss_anon()
        return report
    if _lacks_only_its_tracker(planned, report):
        _write_tracker(planned, dst)
        report.finished_earlier = True
        report.seconds = time.monotonic() - began
        return report
    fill = source.fill_missing_from if source else None
    absent = _absent_parents(dst)
    try:
        place = destination(dst, planned.unit, sources=_sources(planned, fill), overwrite=run.overwrite)
        with StagingLock(place.staging), _kept_to_resume(place.staging):
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
            )
            report.steps = steps_of(report.outcome)
            report.seconds = time.monotonic() - began
            report.peak_rss_anon = peak_rss_anon()
            # ASCII, since names of files and directories need not be Unicode.
            manifest = json.dumps(make_manifest(planned, report), indent=1).encode()
            write_atomically(unit_dir(place.staging) / MANIFEST_FILE, manifest)
            publish(place.staging, place.final, overwrite=run.overwrite)
    except GlmconvError:
        for parent in absent:
            with suppress(OSError):  # it is not empty: the journal lies in it, or another run's
                parent.rmdir()
        raise
    _write_tracker(planned, place.dst)
    report.seconds = time.monotonic() - began
    return report


def _write_tracker(planned: Planned, root: Path) -> None:
    if planned.unit is not None:
        write_tracker(root, "release" if planned.unit == "release" else str(planned.options.iteration))


def _lacks_only_its_tracker(planned: Planned, report: Report) -> bool:
    """Whether a run of this very plan was killed between its rename and its tracker."""
    if planned.unit is None or (report.destination / TRACKER).exists():
        return False
    manifest = read_manifest(report.path / MANIFEST_FILE)
    return manifest is not None and manifest.get("plan_digest") == planned.plan.digest


def _absent_parents(dst: Path) -> list[Path]:
    """Directories above the destination that are still to be made, the deepest first."""
    return [parent for parent in Path(os.path.realpath(dst)).parents if not os.path.lexists(parent)]


@contextmanager
def _kept_to_resume(staging: Path) -> Iterator[None]:
    """Remove the staging directory where a run fails that leaves nothing to resume.

    That is a run that began here and found the data wrong, or one that failed before its journal
    was there. What an earlier run left is kept.
    """
    began_earlier = journal_path(staging).exists()
    try:
        yield
    except GlmconvError as error:
        resumable = began_earlier or (journal_path(staging).exists() and not isinstance(error, DataError))
        if not resumable:
            discard(staging)
        raise


def _sources(planned: Planned, fill: Path | None) -> list[Path]:
    """Directories that the destination must be apart from."""
    return [path for path in (planned.source.path, planned.source.hf_dir, fill) if path is not None]


def _require_space(planned: Planned, place: Destination, run: RunOptions) -> None:
    """Preflight of the disk; what an earlier run already wrote counts as there.

    StorageError where space is short, or where ``clone`` is asked for and impossible.
    """
    need = space_needed(planned.plan, place.staging, run.copy_mode)
    present = sum(
        os.stat(Path(folder) / name).st_blocks * 512
        for folder, _, names in os.walk(place.staging)
        for name in names
    )
    require_space(place.staging, max(0, need - present))
