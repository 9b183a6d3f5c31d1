"""The straight line: open, understand, plan, prove, move, publish, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmconv import __version__
from glmconv.digest import digest_bytes
from glmconv.engine import (
    CopyMode,
    Destination,
    HashMode,
    Outcome,
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
from glmconv.engine.publish import journal_path
from glmconv.errors import DataError, Defect, GlmconvError
from glmconv.ledger import Ledger
from glmconv.manifest import FILE as MANIFEST_FILE
from glmconv.memory import no_collection, peak_rss_anon
from glmconv.opening import local_path, open_source
from glmconv.planner import Planned, TargetOptions, make_plan
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


@dataclass(slots=True)
class Report:
    """What a conversion did, or with ``dry_run`` would do. ``path`` is the published unit."""

    source: Path
    destination: Path
    path: Path
    model_type: str
    from_layout: str
    to_layout: str
    plan_digest: str
    ledger: Ledger
    files: int
    widened: dict[str, str]
    dropped: list[tuple[str, str, int]]
    warnings: list[Defect]
    plan_seconds: float
    outcome: Outcome | None = None
    seconds: float = 0.0
    peak_rss_anon: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``."""
        outcome = self.outcome
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "path": str(self.path),
            "model_type": self.model_type,
            "from": self.from_layout,
            "to": self.to_layout,
            "plan_digest": self.plan_digest,
            "ledger": {name: getattr(self.ledger, name) for name in Ledger.__slots__},
            "files": self.files,
            "widened": self.widened,
            "dropped": [{"name": n, "reason": r, "bytes": size} for n, r, size in self.dropped],
            "warnings": [str(warning) for warning in self.warnings],
            "plan_seconds": round(self.plan_seconds, 3),
            "dry_run": outcome is None,
            "seconds": round(self.seconds, 3),
            "peak_rss_anon": self.peak_rss_anon,
            "bytes": self.steps,
            "copying": outcome.copying() if outcome else {},
        }


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
    report = _report(planned, src, dst, time.monotonic() - began)
    if run.dry_run:
        report.seconds = time.monotonic() - began
        report.peak_rss_anon = peak_rss_anon()
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
            report.steps = _steps(report.outcome)
            report.seconds = time.monotonic() - began
            report.peak_rss_anon = peak_rss_anon()
            # ASCII, since names of files and directories need not be Unicode.
            manifest = json.dumps(_manifest(planned, report), indent=1).encode()
            write_atomically(unit_dir(place.staging) / MANIFEST_FILE, manifest)
            publish(place.staging, place.final, overwrite=run.overwrite)
    except GlmconvError:
        for parent in absent:
            with suppress(OSError):  # it is not empty: the journal lies in it, or another run's
                parent.rmdir()
        raise
    if planned.unit is not None:
        write_tracker(place.dst, "release" if planned.unit == "release" else str(planned.options.iteration))
    report.seconds = time.monotonic() - began
    return report


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


def _report(planned: Planned, src: Path, dst: Path, seconds: float) -> Report:
    plan = planned.plan
    return Report(
        source=src,
        destination=dst,
        path=dst if planned.unit is None else dst / planned.unit,
        model_type=planned.source.spec.model_type,
        from_layout=_layout_name(planned.source.kind, planned.source.layout),
        to_layout=_layout_name(planned.to, planned.layout.name),
        plan_digest=plan.digest,
        ledger=planned.ledger,
        files=len(plan.targets),
        widened={name: dtype.label for name, dtype in planned.widened.items()},
        dropped=[(one.name, one.reason, one.size) for one in plan.dropped],
        warnings=planned.warnings,
        plan_seconds=seconds,
    )


def _layout_name(kind: str, layout: str) -> str:
    return f"megatron ({layout})" if kind == "megatron" else layout


def _steps(outcome: Outcome) -> dict[str, int]:
    return {
        "cloned": outcome.bytes_cloned,
        "copied": outcome.bytes_copied,
        "computed": outcome.bytes_computed,
        "zero": outcome.bytes_zero,
        "literal": outcome.bytes_literal,
        "reused": outcome.bytes_reused,
    }


def _manifest(planned: Planned, report: Report) -> dict[str, Any]:
    """What is left beside the data: where it came from, what was done, what each tensor hashes to."""
    source, outcome = planned.source, report.outcome
    return {
        "tool": "glmconv",
        "version": __version__,
        "model_type": source.spec.model_type,
        "layout": planned.to,
        "dialect": planned.layout.name if planned.to == "megatron" else None,
        "source": {"path": str(source.path.resolve()), "layout": report.from_layout},
        "plan_digest": report.plan_digest,
        "dtype": planned.options.dtype,
        "widened": report.widened,
        "dropped": [{"name": n, "reason": r, "bytes": size} for n, r, size in report.dropped],
        "warnings": [str(warning) for warning in report.warnings],
        "ledger": {name: getattr(report.ledger, name) for name in Ledger.__slots__},
        "bytes": report.steps,
        "seconds": round(report.seconds, 3),
        "peak_rss_anon": report.peak_rss_anon,
        "hash": {"mode": outcome.hash_mode if outcome else "none", "name": "xxh3_128 tree, 4 MiB leaves"},
        "files": _file_hashes(planned, outcome),
    }


def _file_hashes(planned: Planned, outcome: Outcome | None) -> list[dict[str, Any]]:
    """Each file with its size, the digest of its literal bytes and those of its payloads."""
    files = []
    for target in planned.plan.targets:
        entry: dict[str, Any] = {"path": target.path, "size": target.size}
        entry["literals"] = digest_bytes(b"".join(data for _, data in sorted(target.literals)))
        entry["payloads"] = [
            [
                payload.name,
                list(payload.place),
                payload.offset,
                payload.size,
                outcome.digest(target.path, index).hex() if outcome and outcome.leaves else None,
            ]
            for index, payload in enumerate(target.payloads)
        ]
        files.append(entry)
    return files
