"""The proof of a plan: every target byte written once, every source byte used once or dropped.

It looks at the finished plan alone, not at the tables that made it, so a mistake in the planner
shows here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from glmconv.basics.errors import DataError, Defect
from glmconv.plan.plan import Move, Payload, Plan

Range = tuple[int, int]
"""Start and end, in bytes."""

Runs = tuple[int, int, int, int]
"""Offset, bytes of a run, number of runs, stride."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of a proven plan, all in bytes except ``chunks`` and ``moves``.

    ``stored_bytes``, tensors of the source, is the sum of ``used_bytes`` and ``dropped_bytes``.
    ``repeated_bytes`` are read again for duplicates that the output keeps; ``side_bytes`` belong to
    config, tokenizer and the like; ``target_bytes`` are all bytes of the output's files.
    """

    chunks: int
    moves: int
    stored_bytes: int
    used_bytes: int
    dropped_bytes: int
    repeated_bytes: int
    side_bytes: int
    target_bytes: int
    zero_bytes: int
    computed_bytes: int


def _bands(runs: Iterable[Runs]) -> list[Range] | str:
    """Merge (offset, run, count, stride) into ranges; a text where strided runs leave holes.

    Strided runs that belong together (column shards of one band of rows) start within one stride
    of the band's first byte and tile that stride exactly.
    """
    plain: list[Range] = []
    striped: dict[tuple[int, int], list[Range]] = {}
    for offset, run, count, stride in runs:
        if count == 1 or stride == run:
            plain.append((offset, offset + run * count))
        else:
            striped.setdefault((count, stride), []).append((offset, offset + run))
    for (count, stride), columns in striped.items():
        columns.sort()
        first = at = columns[0][0]
        for start, end in columns:
            if start >= first + stride and at == first + stride:
                plain.append((first, first + stride * count))
                first = at = start
            if start != at:
                return f"columns of a band overlap or leave a hole at byte {start}"
            at = end
        if at != first + stride:
            return f"columns of a band cover {at - first} of {stride} bytes"
        plain.append((first, first + stride * count))
    return plain


def _tile_payload(payload: Payload) -> str:
    """Empty where the moves tile the payload exactly (zeros allowed at its end), else what is wrong."""
    moves = payload.moves
    if len(moves) == 1 and moves[0].count == 1:
        bands: list[Range] | str = [(moves[0].dst_offset, moves[0].dst_offset + moves[0].dst_run)]
    else:
        bands = _bands((m.dst_offset, m.dst_run, m.count, m.dst_stride) for m in moves)
    if isinstance(bands, str):
        return bands
    at = 0
    for start, end in sorted(bands):
        if start != at:
            return (
                f"bytes {min(at, start)} to {max(at, start)} are written {'twice' if start < at else 'never'}"
            )
        at = end
    if at + payload.zeros != payload.size:
        return f"moves fill {at} bytes, zeros {payload.zeros}, of {payload.size}"
    return ""


def prove(plan: Plan, wanted: Mapping[int, list[Runs]], stored_bytes: int, repeated: set[str]) -> Ledger:
    """Prove the plan or raise DataError with every place where it fails.

    ``wanted``: for each source file the runs that hold tensors to be converted; ``stored_bytes``:
    all bytes of tensors that the source holds, converted or dropped. ``repeated`` names payloads
    that repeat another's bytes on purpose (duplicates that a family keeps), which do not count as
    a second use.
    """
    defects: list[Defect] = []
    reads: dict[int, list[Runs]] = {}
    chunks = moves = used = again = side = computed = zeros = 0
    for target, payload in plan.payloads():
        wrong = _tile_payload(payload)
        if wrong:
            defects.append(Defect("ledger", wrong, f"{target.path}: {payload.name}{list(payload.place)}"))
        chunks += 1
        moves += len(payload.moves)
        zeros += payload.zeros
        for move in payload.moves:
            computed += move.src_bytes if move.cast else 0
            if payload.name in repeated:
                again += move.src_bytes
            elif move.src in wanted:
                used += move.src_bytes
                reads.setdefault(move.src, []).append(_read(move))
            else:
                side += move.src_bytes
    for file, runs in wanted.items():
        wrong = _covers(reads.get(file, []), runs)
        if wrong:
            defects.append(Defect("ledger", wrong, plan.sources[file].address))
    for target in plan.targets:
        payloads = [(p.offset, p.offset + p.size) for p in target.payloads]
        wrong = _file_tiles(target.size, payloads, target.literals)
        if wrong:
            defects.append(Defect("ledger", wrong, target.path))
    defects += _paths(plan)
    dropped = sum(one.size for one in plan.dropped)
    if used + dropped != stored_bytes:
        lost = stored_bytes - used - dropped
        defects.append(
            Defect("ledger", f"{lost:,} bytes of the source's tensors are neither used nor dropped")
        )
    if defects:
        raise DataError(
            "the plan is not a proof: this is a mistake in glmconv, nothing was written", defects=defects
        )
    return Ledger(
        chunks=chunks,
        moves=moves,
        stored_bytes=stored_bytes,
        used_bytes=used,
        dropped_bytes=dropped,
        repeated_bytes=again,
        side_bytes=side,
        target_bytes=plan.target_bytes,
        zero_bytes=zeros,
        computed_bytes=computed,
    )


def _paths(plan: Plan) -> Iterator[Defect]:
    """No two targets are the same file, or one a directory of the other, and none leaves the unit."""
    paths = [PurePosixPath(target.path) for target in plan.targets]
    files = set(paths)
    for target, path in zip(plan.targets, paths, strict=True):
        if path.is_absolute() or not path.parts or ".." in path.parts:
            yield Defect("ledger", "is not a path inside the unit", target.path)
        if any(parent in files for parent in path.parents):
            yield Defect("ledger", "lies inside of another target file", target.path)
    for path, count in Counter(paths).items():
        if count > 1:
            yield Defect("ledger", f"is written {count} times", str(path))


def _read(move: Move) -> Runs:
    return move.src_offset, move.run, move.count, move.src_stride


def _covers(reads: list[Runs], wanted: list[Runs]) -> str:
    """Empty where the reads cover the wanted runs exactly once."""
    bands, tensors = _bands(reads), _bands(wanted)
    if isinstance(bands, str):
        return bands
    if isinstance(tensors, str):
        return f"tensors of the source: {tensors}"
    used, want = _merge(bands), _merge(tensors)
    if isinstance(used, str):
        return f"source {used}"
    if isinstance(want, str):
        return f"tensors of the source overlap: {want}"
    if used != want:
        extra = sorted(set(used) ^ set(want))[0]
        return f"source bytes {extra[0]} to {extra[1]} are not used exactly once"
    return ""


def _merge(ranges: list[Range]) -> list[Range] | str:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if start == end:
            continue
        if merged and start < merged[-1][1]:
            return f"bytes {start} to {min(end, merged[-1][1])} are used twice"
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _file_tiles(size: int, payloads: list[Range], literals: list[tuple[int, bytes]]) -> str:
    """Payloads and literals of a file must not overlap nor reach past its end."""
    merged = _merge(payloads + [(offset, offset + len(data)) for offset, data in literals])
    if isinstance(merged, str):
        return merged
    return f"reaches byte {merged[-1][1]} of {size}" if merged and merged[-1][1] > size else ""
