"""Every byte read once: NaN, infinities, tensors of zeros, experts that repeat another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, Defect
from glmconv.basics.threads import Meter, OnStep, work_through
from glmconv.checks.findings import CheckReport
from glmconv.checks.subject import Subject, templates, vocabulary_tensors
from glmconv.source.locate import Located
from glmconv.values.reader import Block, Reader, floats, nbytes

# Bits of the magnitude, and the smallest that is not a finite number.
_MAGNITUDE = {
    DType.BF16: (0x7FFF, 0x7F80),
    DType.F16: (0x7FFF, 0x7C00),
    DType.F32: (0x7FFF_FFFF, 0x7F80_0000),
    DType.F64: (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}

SETS_SHOWN = 6


@dataclass(slots=True)
class Scan:
    """What one tensor holds. ``first`` is (row, column) of the first NaN or infinity."""

    name: str
    zero: bool = True
    nan: int = 0
    infinite: int = 0
    first: tuple[int, int] | None = None
    digest: bytes = b""
    trouble: Defect | None = None


def check_values(report: CheckReport, subject: Subject, workers: int, progress: OnStep | None) -> None:
    """Scan all tensors of the model, in the order in which they lie on disk."""
    source = subject.source
    experts = _experts(subject)
    compared = {name for layer in experts for names in layer.names for name in names}
    compared |= set(vocabulary_tensors(source.table))
    items = sorted(source.tensors.items(), key=lambda item: _place(item[1]))
    meter = Meter(sum(nbytes(located) for _, located in items), progress)

    def scan(reader: Reader, item: tuple[str, Located]) -> Scan:
        return _scan(reader, item[0], item[1], item[0] in compared, meter)

    scans = work_through(items, lambda: Reader(source.files), scan, workers)
    report.scanned = len(scans)
    report.bytes_read += meter.done
    found = {one.name: one for one in scans}
    for name in source.tensors:
        _judge(report, subject, found[name])
    _judge_experts(report, experts, found)
    _judge_head(report, subject, found)


def _place(located: Located) -> tuple[int, int]:
    return (located.pieces[0].file, located.pieces[0].offset) if located.pieces else (-1, 0)


def _scan(reader: Reader, name: str, located: Located, digest: bool, meter: Meter) -> Scan:
    found, hasher = Scan(name), xxhash.xxh3_128()
    limits = _MAGNITUDE.get(located.dtype)
    try:
        for block in reader.blocks(located):
            if digest:
                hasher.update(block.bits.reshape(-1).view(np.uint8).data)
            if limits is not None:
                _scan_block(found, block, located.dtype, limits)
            elif block.bits.any():
                found.zero = False
            meter.add(block.bits.nbytes)
    except DataError as error:
        found.trouble = Defect("unreadable", error.what, error.where or name, error.hint)
        return found
    found.digest = hasher.digest() if digest else b""
    return found


def _scan_block(found: Scan, block: Block, dtype: DType, limits: tuple[int, int]) -> None:
    """One pass over the magnitudes decides for almost every block; the rest is for the wrong ones."""
    magnitude, infinity = limits
    largest = int((block.bits & block.bits.dtype.type(magnitude)).max())
    if largest:
        found.zero = False
    if largest < infinity:
        return
    values = floats(block.bits, dtype)
    odd = ~np.isfinite(values)
    found.nan += int(np.isnan(values).sum())
    found.infinite += int(np.isinf(values).sum())
    if found.first is None:
        i, j = divmod(int(np.argmax(odd)), values.shape[1])
        found.first = (block.row + i, block.col + j)


def _judge(report: CheckReport, subject: Subject, scan: Scan) -> None:
    if scan.trouble is not None:
        report.findings.append(scan.trouble)
        return
    if scan.first is not None:
        counts = [f"{count:,} {word}" for count, word in ((scan.nan, "NaN"), (scan.infinite, "Inf")) if count]
        report.note(
            "not-finite",
            f"holds {' and '.join(counts)}, the first at {list(scan.first)}",
            subject.place(scan.name),
            "the file is damaged or training diverged",
        )
    if scan.zero and nbytes(subject.source.tensors[scan.name]):
        # A bias may be zero before training; a weight or a gain of zeros switches its layer off.
        is_bias = scan.name.endswith("bias")
        report.note(
            "zero",
            "holds nothing but zeros",
            subject.place(scan.name),
            "" if is_bias else "a conversion lost it, or the file has holes",
            "warning" if is_bias else "error",
        )


@dataclass(frozen=True, slots=True)
class _Experts:
    """Names of each expert's tensors in one layer."""

    layer: int
    names: list[list[str]]


def _experts(subject: Subject) -> list[_Experts]:
    source, moe = subject.source, subject.source.spec.moe
    if moe is None:
        return []
    parts = templates(source.table, "{expert}")
    found = []
    for layer in subject.layers:
        named = [part.replace("{layer}", layer.prefix) for part in parts]
        names = [[name.replace("{expert}", str(e)) for name in named] for e in range(moe.num_experts)]
        if any(name in source.tensors for expert in names for name in expert):
            found.append(_Experts(layer.number, names))
    return found


def _judge_experts(report: CheckReport, layers: Sequence[_Experts], scans: dict[str, Scan]) -> None:
    """Experts that hold the same bytes as another: a local number taken for a global one."""
    seen: dict[tuple[bytes, ...], tuple[int, int]] = {}
    for layer in layers:
        same: dict[tuple[bytes, ...], list[int]] = {}
        for expert, names in enumerate(layer.names):
            parts = [scans[name] for name in names if name in scans]
            if len(parts) == len(names) and not any(part.zero or part.trouble for part in parts):
                same.setdefault(tuple(part.digest for part in parts), []).append(expert)
        _judge_layer(report, layer, same)
        for digests, experts in same.items():
            first = seen.setdefault(digests, (layer.layer, experts[0]))
            if first[0] != layer.layer:
                report.note(
                    "duplicate-expert",
                    f"expert {experts[0]} of layer {layer.layer} holds the same bytes as expert {first[1]} "
                    f"of layer {first[0]}",
                    layer.names[experts[0]][0],
                    "right only where layers were copied on purpose",
                    "warning",
                )


def _judge_layer(report: CheckReport, layer: _Experts, same: dict[tuple[bytes, ...], list[int]]) -> None:
    sets = [experts for experts in same.values() if len(experts) > 1]
    if not sets:
        return
    shown = ", ".join(" = ".join(map(str, experts)) for experts in sets[:SETS_SHOWN])
    more = f" and {len(sets) - SETS_SHOWN} more sets" if len(sets) > SETS_SHOWN else ""
    report.note(
        "duplicate-expert",
        f"experts of layer {layer.layer} hold the same bytes: {shown}{more} "
        f"({len(same)} of {len(layer.names)} are distinct)",
        layer.names[sets[0][1]][0],
        "a converter numbered the experts of each rank from 0, or copied one over another",
    )


def _judge_head(report: CheckReport, subject: Subject, scans: dict[str, Scan]) -> None:
    """An untied head that equals the embedding: the config or a conversion is wrong."""
    held = [scans[name] for name in vocabulary_tensors(subject.source.table) if name in scans]
    if len(held) == 2 and held[0].digest == held[1].digest and not held[0].zero:
        report.note(
            "tied",
            f"holds the same bytes as {held[0].name}, but config.json says that they are not tied",
            subject.place(held[1].name),
            "set tie_word_embeddings where the model is tied",
            "warning",
        )
