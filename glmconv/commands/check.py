"""Run the checks that were asked for, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.basics.threads import OnStep
from glmconv.checks.duplicates import check_duplicates, check_padding
from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.checks.hashes import check_hashes
from glmconv.checks.indexer import check_indexer
from glmconv.checks.pipeline import check_pipeline
from glmconv.checks.router import check_locked
from glmconv.checks.structure import check_structure, explain_unopened
from glmconv.checks.subject import Subject
from glmconv.checks.values import check_values
from glmconv.source.open import open_source
from glmconv.source.source import describe_layout
from glmconv.source.torchdist.location import detect_layout, locate


def check(path: Path, options: CheckOptions | None = None, progress: OnStep | None = None) -> CheckReport:
    """Check the checkpoint at ``path``: an HF directory, a torch_dist root or unit.

    Everything wrong with the data is a finding of the report. Raises UsageError for options that
    mean nothing here and StorageError for what cannot be read.
    """
    began, options = time.monotonic(), options or CheckOptions()
    if options.against is not None and not options.indexer:
        raise UsageError(
            "--against belongs to --check-dsa-indexer", hint="`glmconv diff` compares all tensors"
        )
    staged = (options.first_stage_layers, options.last_stage_layers)
    if options.pipeline_stages is None and staged != (None, None):
        raise UsageError("layers of the first or last stage mean nothing without --pp")
    path = Path(path)
    report = CheckReport(path)
    try:
        source = open_source(path, options.source)
    except DataError as error:
        explain_unopened(report, error)
    else:
        _check_opened(report, Subject(source), options, progress)
    if options.hashes:
        try:
            check_hashes(report, _unit(path), options.workers, progress)
        except DataError as error:
            report.findings += error.defects or [Defect("manifest", error.what, error.where, error.hint)]
    report.seconds = time.monotonic() - began
    return report


def _check_opened(
    report: CheckReport, subject: Subject, options: CheckOptions, progress: OnStep | None
) -> None:
    source = subject.source
    report.layout, report.model_type = describe_layout(source), source.spec.model_type
    check_structure(report, subject)
    check_locked(report, subject)
    check_duplicates(report, subject, progress)
    check_padding(report, subject)
    if options.pipeline_stages is not None:
        first, last = options.first_stage_layers, options.last_stage_layers
        check_pipeline(report, source.spec, options.pipeline_stages, first, last)
    if options.indexer:
        check_indexer(report, subject, options.against)
    if options.values:
        check_values(report, subject, options.workers, progress)


def _unit(path: Path) -> Path:
    """Directory that holds the manifest."""
    return locate(path).unit_dir if detect_layout(path) == "megatron" else path
