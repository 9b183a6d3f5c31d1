"""Lay out a torch_dist checkpoint: records in `.distcp` files, `.metadata`, `common.pt`, side files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect
from glmconv.formats.safetensors.origin import FILE as ORIGIN_FILE
from glmconv.formats.torchdist.common import METADATA_JSON, common_state, write_common
from glmconv.formats.torchdist.entries import Chunk, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.extra_state import EMPTY_STATE, extra_state_names
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.formats.torchdist.record import MAX_PAYLOAD, frame
from glmconv.plan.draft import Draft, DtypePolicy, Parts, add_side_files, literal_file, saved_dtype
from glmconv.plan.plan import Payload, TargetFile
from glmconv.plan.training_args import args_namespace
from glmconv.source.manifest import HF_DIR
from glmconv.source.source import Source
from glmconv.tables.expand import Layout, Part, view2d

PAGE = 4096
"""Payloads lie where their sources do modulo this, so that filesystems can share their blocks."""

FILES_AIMED_AT = 16
SMALLEST_FILE = 64 << 20
LARGEST_FILE = 4 << 30
"""A checkpoint becomes about 16 files between these sizes: enough for parallel writers and readers."""

OBJECTS_FILE = "__0_0.distcp"


@dataclass(slots=True)
class _Record:
    """One chunk to be stored: a payload (its offset not yet known) and its global box."""

    payload: Payload
    sizes: tuple[int, ...]


def draft_torch_dist(
    source: Source,
    layout: Layout,
    policy: DtypePolicy,
    *,
    padded_vocab: int | None = None,
    iteration: int = 0,
    changes: Mapping[str, Any] | None = None,
    max_payload: int = MAX_PAYLOAD,
) -> Draft:
    """Draft the unit directory of a torch_dist checkpoint in ``layout`` (a dialect).

    ``padded_vocab``: rows of embedding and head, zero past the vocabulary. ``max_payload``: bytes
    that each record's payload stays below; a larger chunk is cut by rows.
    """
    draft = Draft(list(source.files))
    records: list[_Record] = []
    shapes: dict[str, tuple[DType, tuple[int, ...]]] = {}
    parts = Parts(source, layout, policy, draft)
    for name, group, dtype in parts:
        rows = padded_vocab if group[0].pads and padded_vocab else view2d(group[0].shape)[0]
        inner = (rows, *group[0].shape[1:]) if group[0].shape else ()
        shapes[name] = (dtype, (*layout.axes[name], *inner))
        for part in group:
            records += _records(parts, part, dtype, rows, max_payload)
    chunks = _place(draft, records)
    objects = _objects(draft, {name: shape for name, (_, shape) in shapes.items()})
    entries = {
        name: TensorEntry(dtype, shape, tuple(chunks.get(name, ())))
        for name, (dtype, shape) in shapes.items()
    }
    _surroundings(draft, source, layout, policy, iteration, changes or {}, padded_vocab)
    draft.targets.append(literal_file(".metadata", metadata_bytes(entries, objects)))
    return draft


def _records(parts: Parts, part: Part, dtype: DType, rows: int, max_payload: int) -> list[_Record]:
    """The chunks of one part: each slot of a gate/up pair for itself, other parts whole.

    A loader reads whole records for any slice of them, so chunks stay small: one expert's gate. What
    does not stay below ``max_payload`` bytes is cut further, between rows.
    """
    whole, _ = view2d(part.shape)
    width = prod(part.shape[1:]) * dtype.itemsize
    if width >= max_payload:
        what = (
            f"{dtype.label}{list(part.shape)}: one row of it has {width} bytes, and a record, which is cut "
            f"between rows, must stay below {max_payload}"
        )
        hint = "torch_dist files cannot hold it; check the sizes in config.json"
        parts.draft.defects.append(Defect("record", what, part.stored, hint))
        return []
    if part.separate:
        spans = sorted((boxes[0].part_row, boxes[0].part_row + boxes[0].rows) for _, boxes in part.slots)
    else:
        spans = [(0, rows)]
    made = []
    for start, stop in (cut for span in spans for cut in row_cuts(*span, width, max_payload)):
        body = (stop - start, *part.shape[1:]) if part.shape else ()
        sizes = (*(1 for _ in part.index), *body)
        place = (*part.index, start, *(0 for _ in part.shape[1:])) if part.shape else part.index
        moves = parts.moves(part, (start, min(stop, whole)), dtype)
        size = prod(body) * dtype.itemsize
        filled = sum(move.dst_run * move.count for move in moves)
        payload = Payload(part.stored, dtype, sizes, 0, size, moves, place, size - filled)
        made.append(_Record(payload, sizes))
    return made


def row_cuts(start: int, stop: int, width: int, limit: int) -> list[tuple[int, int]]:
    """Rows ``start`` to ``stop`` of ``width`` bytes in the fewest ranges that stay below ``limit`` bytes.

    Ranges are equal but for one row, so that they depend on the shape alone. ``width`` is below ``limit``.
    """
    rows = stop - start
    count = max(-(-rows // ((limit - 1) // max(width, 1))), 1)
    return [(start + rows * i // count, start + rows * (i + 1) // count) for i in range(count)]


def _place(draft: Draft, records: Sequence[_Record]) -> dict[str, list[Chunk]]:
    """Give every record its file and offset, in the order of its source, and return the chunks."""
    total = sum(record.payload.size for record in records)
    limit = min(max(total // FILES_AIMED_AT, SMALLEST_FILE), LARGEST_FILE)
    chunks: dict[str, list[Chunk]] = {}
    file: TargetFile | None = None
    for record in sorted(records, key=_source_order):
        payload = record.payload
        around = frame(payload.dtype, payload.shape)
        length = len(around.head) + payload.size + len(around.tail)
        if file is None or (file.payloads and file.size + length > limit):
            file = TargetFile(f"__0_{len(draft.targets) + 1}.distcp", 0)
            draft.targets.append(file)
        residue = payload.moves[0].src_offset - payload.moves[0].dst_offset if payload.moves else 0
        start = file.size + (residue - file.size - len(around.head)) % PAGE
        payload.offset = start + len(around.head)
        file.literals.append((start, around.head))
        file.literals.append((payload.offset + payload.size, around.tail))
        file.payloads.append(payload)
        file.size = start + length
        chunk = Chunk(payload.place, record.sizes, file.path, start, length)
        chunks.setdefault(payload.name, []).append(chunk)
    return chunks


def _source_order(record: _Record) -> tuple[int, int]:
    moves = record.payload.moves
    return (moves[0].src, moves[0].src_offset) if moves else (-1, 0)


def _objects(draft: Draft, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ObjectEntry]:
    """The `_extra_state` superset; all entries share the one stored value."""
    draft.targets.insert(0, literal_file(OBJECTS_FILE, EMPTY_STATE))
    one = ObjectEntry(OBJECTS_FILE, 0, len(EMPTY_STATE))
    return dict.fromkeys(extra_state_names(shapes), one)


def _surroundings(
    draft: Draft,
    source: Source,
    layout: Layout,
    policy: DtypePolicy,
    iteration: int,
    changes: Mapping[str, Any],
    padded_vocab: int | None,
) -> None:
    """Everything around the tensors: the trainer's common state, HF config and side files."""
    per_layer = not layout.stacked
    rows = padded_vocab or source.spec.vocab_size
    dtype = saved_dtype(source, policy.cast)
    args = args_namespace(source.spec, padded_vocab_size=rows, per_layer=per_layer, dtype=dtype)
    common = common_state(args, iteration=iteration, per_layer=per_layer)
    draft.targets.append(literal_file("common.pt", write_common(common)))
    draft.targets.append(literal_file("metadata.json", METADATA_JSON))
    add_side_files(draft, source, f"{HF_DIR}/", changes)
    if source.origin is not None:
        draft.targets.append(literal_file(f"{HF_DIR}/{ORIGIN_FILE}", source.origin.to_json()))
