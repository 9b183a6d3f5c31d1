"""The sparse-attention indexer: which layers own one, and whether its channels are ordered rightly.

Facts: runtimes of some dialects keep the rotary channels of an index head last, Hugging Face and
others first. Converters have written the one order for the other, which loads and runs, and
selects other tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glmconv.basics.errors import DataError, UsageError
from glmconv.checks.findings import CheckReport, ComparedPart, IndexerPart, IndexerReport
from glmconv.checks.subject import INDEXER, Layer, Subject, templates
from glmconv.source.locate import Located
from glmconv.source.open import open_source
from glmconv.source.source import Source, SourceOptions
from glmconv.values.reader import Reader, floats, nbytes, rounded, stored_view

ROTATED = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
"""Tensors whose rows are channels of index heads; the order of all must agree."""

EXPECTED = {"Same": "equal", "RopeHalfSwap": "half-swapped"}
"""Order in which a transform stores a tensor, beside Hugging Face's."""

CLEARLY = 4.0
"""A tensor that is this many times nearer to one order than to the other is said to be in it."""


def check_indexer(report: CheckReport, subject: Subject, against: Path | None) -> None:
    """Report owners, schedule, shapes and dtypes; with ``against`` compare the stored order.

    A model without an indexer is a finding: whoever asks expects one.
    """
    source = subject.source
    dsa = source.spec.dsa
    if dsa is None:
        report.indexer = IndexerReport([], [], {}, [], [], None, None, [])
        report.note("indexer", f"{source.spec.model_type} has no sparse-attention indexer", "config.json")
        return
    owned = [layer for layer in subject.layers if not layer.is_mtp and dsa.full[layer.number]]
    mtp = [layer for layer in subject.layers if layer.is_mtp]
    owners = [layer.number for layer in owned]
    sharing = [layer.number for layer in subject.layers if not layer.is_mtp and layer.number not in owners]
    report.indexer = IndexerReport(
        found=[layer.number for layer in owned if _present(source, layer)],
        owners=owners,
        sources={layer: max(owner for owner in owners if owner < layer) for layer in sharing},
        mtp_found=[layer.number for layer in mtp if _present(source, layer)],
        mtp_expected=[layer.number for layer in mtp],
        frequency=dsa.freq,
        offset=dsa.offset,
        parts=_parts(source, [*owned, *mtp]),
    )
    if against is not None:
        report.indexer.against = str(against)
        _compare_all(report, subject, [*owned, *mtp], _reference(against))


def _reference(path: Path) -> Source:
    source = open_source(path, SourceOptions())
    if source.kind != "hf":
        raise UsageError("--against must name a Hugging Face checkpoint", where=str(path))
    return source


def _names(source: Source, layer: Layer) -> dict[str, str]:
    """Indexer tensors of one layer: Hugging Face name by the part after the indexer's own name."""
    filled = [name.replace("{layer}", layer.prefix) for name in templates(source.table, INDEXER)]
    return {name.partition(INDEXER)[2]: name for name in filled}


def _present(source: Source, layer: Layer) -> bool:
    return any(name in source.tensors for name in _names(source, layer).values())


def _parts(source: Source, layers: list[Layer]) -> list[IndexerPart]:
    found: dict[str, IndexerPart] = {}
    for layer in layers:
        for part, name in _names(source, layer).items():
            seen = found.setdefault(part, IndexerPart(part, [], []))
            located = source.tensors.get(name)
            if located is None:
                continue
            shape = list(located.tensor.shape)
            seen.shapes += [shape] if shape not in seen.shapes else []
            seen.dtypes += [located.dtype.label] if located.dtype.label not in seen.dtypes else []
    return list(found.values())


def _compare_all(report: CheckReport, subject: Subject, layers: list[Layer], reference: Source) -> None:
    source = subject.source
    if report.indexer is None:
        return
    with Reader(source.files) as ours, Reader(reference.files) as theirs:
        for layer in layers:
            names = _names(source, layer)
            for part in ROTATED:
                name = names[part]
                home = subject.skeleton.home[name]
                expected = EXPECTED[home.transform]
                held, wanted = source.stored.get(home.stored), reference.tensors.get(name)
                if held is None or wanted is None:
                    place = str(reference.path) if wanted is None else str(source.path)
                    found = ComparedPart(layer.number, part, "missing", expected, f"not in {place}")
                else:
                    stored = stored_view(held, home.index)
                    report.bytes_read += nbytes(stored) + nbytes(wanted)
                    found = _compare(subject, (ours, stored), (theirs, wanted), layer.number, part, expected)
                report.indexer.compared.append(found)
    _judge(report, report.indexer.compared)


def _compare(
    subject: Subject,
    ours: tuple[Reader, Located],
    theirs: tuple[Reader, Located],
    layer: int,
    part: str,
    expected: str,
) -> ComparedPart:
    """Compare one tensor as it is stored with the reference, straight and with its halves exchanged."""
    try:
        held = floats(ours[0].whole(ours[1]), ours[1].dtype)
        wanted = floats(theirs[0].whole(theirs[1]), theirs[1].dtype)
    except DataError as error:
        return ComparedPart(layer, part, "neither", expected, f"{error.where}: {error.what}")
    if held.shape != wanted.shape:
        hint = f"its shape is {list(held.shape)}, the reference's {list(wanted.shape)}"
        return ComparedPart(layer, part, "neither", expected, hint)
    if ours[1].dtype.itemsize < theirs[1].dtype.itemsize:
        wanted = rounded(wanted, ours[1].dtype)
    swapped = _swap(wanted, subject)
    same, halves = _equal(held, wanted), _equal(held, swapped)
    order = "either" if same and halves else "equal" if same else "half-swapped" if halves else "neither"
    hint = _nearness(held, wanted, swapped) if order == "neither" else ""
    return ComparedPart(layer, part, order, expected, hint)


def _swap(values: NDArray[np.float32], subject: Subject) -> NDArray[np.float32]:
    """Rows of each index head from ``[rope | rest]`` to ``[rest | rope]``; ``values`` is [rows, columns]."""
    dsa, mla = subject.source.spec.dsa, subject.source.spec.mla
    if dsa is None or mla is None:
        raise DataError("an indexer without MLA sizes cannot be compared", where=str(subject.source.path))
    heads = values.reshape(-1, dsa.head_dim, values.shape[1])
    rope = mla.qk_rope_head_dim
    moved: NDArray[np.float32] = np.concatenate([heads[:, rope:], heads[:, :rope]], axis=1)
    return moved.reshape(values.shape)


def _equal(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def _nearness(held: NDArray[np.float32], wanted: NDArray[np.float32], swapped: NDArray[np.float32]) -> str:
    """Which order a tensor of other values is likely in: training moves values, not channels."""
    straight = float(np.abs(held - wanted).mean())
    crossed = float(np.abs(held - swapped).mean())
    apart = f"mean distance {straight:.3g} straight, {crossed:.3g} half-swapped"
    if straight * CLEARLY < crossed:
        return f"other values in the same order ({apart})"
    if crossed * CLEARLY < straight:
        return f"other values with halves exchanged ({apart})"
    return apart


def _judge(report: CheckReport, compared: list[ComparedPart]) -> None:
    """One finding for each way of being wrong, naming its layers."""
    groups: dict[tuple[str, str, str], list[ComparedPart]] = {}
    for found in compared:
        if not found.right:
            groups.setdefault((found.part, found.order, found.expected), []).append(found)
    for (part, order, expected), wrong in groups.items():
        numbers = ", ".join(str(found.layer) for found in wrong)
        report.note(
            "indexer-order",
            f"{part} is {order} beside the reference, right for {report.layout} is {expected}: "
            f"layers {numbers}",
            f"indexer.{part}",
            wrong[0].hint or "convert again from the HF checkpoint",
        )
