"""Tensors that must hold the same: tied heads, copies inside MTP layers; and a padded vocabulary."""

from __future__ import annotations

from glmconv.basics.errors import DataError
from glmconv.basics.threads import Meter, OnStep
from glmconv.checks.findings import CheckReport
from glmconv.checks.subject import Subject, vocabulary_tensors
from glmconv.source.locate import Located
from glmconv.values.differences import compare
from glmconv.values.reader import Reader, nbytes, stored_view


def check_duplicates(report: CheckReport, subject: Subject, progress: OnStep | None) -> None:
    """Compare every stored duplicate with the tensor that it repeats, and say how embeddings are tied."""
    source = subject.source
    pairs = [
        (stored_view(source.stored[equal.name]), stored_view(source.stored[equal.other]))
        for equal in source.equal
    ]
    meter = Meter(sum(nbytes(a) + nbytes(b) for a, b in pairs), progress)
    for one, other in pairs:
        with Reader(source.files) as left, Reader(source.files) as right:
            try:
                found = compare((left, right), one, other, one.tensor.name, meter)
            except DataError as error:
                report.note("unreadable", error.what, error.where or one.tensor.name, error.hint)
                continue
        if found.count:
            report.note(
                "duplicate",
                f"must repeat {other.tensor.name}, but {found.count:,} of {found.elements:,} elements "
                f"differ, the first at {list(found.first or ())}",
                one.tensor.name,
                _hint(subject, one),
            )
    report.bytes_read += meter.done
    report.facts["embeddings"] = _tying(subject)


def _hint(subject: Subject, one: Located) -> str:
    if subject.source.spec.tied and one.tensor.name in vocabulary_tensors(subject.source.table):
        return "config.json says tie_word_embeddings: with true runtimes never read this tensor"
    return "one of the two is wrong: runtimes read only one of them"


def _tying(subject: Subject) -> str:
    source = subject.source
    copies = [equal.name for equal in source.equal]
    kept = f"; stored again: {', '.join(copies)}" if copies else ""
    if not source.spec.tied:
        return f"not tied, head of its own{kept}"
    return f"tied{kept or ', head not stored'}"


def check_padding(report: CheckReport, subject: Subject) -> None:
    """Rows past the vocabulary must be zero, unless the run calls them padding: an export refuses others."""
    source = subject.source
    if source.kind != "megatron":
        return
    for part in subject.skeleton.parts:
        stored = source.stored.get(part.stored)
        if not part.pads or stored is None or stored.shape[1:] != part.shape[1:]:
            continue
        rows, padded = part.shape[0], stored.shape[0]
        if padded <= rows:
            continue
        report.facts["vocabulary"] = f"{rows:,} rows, padded to {padded:,}"
        view, filled = stored_view(stored, first_row=rows), 0
        with Reader(source.files) as reader:
            for block in reader.blocks(view):
                filled += int(block.bits.any(axis=1).sum())
        report.bytes_read += nbytes(view)
        if filled and any(blank.name == part.stored for blank in source.blank):
            report.note(
                "padding",
                f"{filled} of {padded - rows} rows past the vocabulary are not zero; an export refuses them",
                part.stored,
                "set vocab_size in config.json to the number of rows that the model has",
            )
