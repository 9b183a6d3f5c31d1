"""What both writers share: the dtype policy, stored tensors as moves, side files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect
from glmconv.formats.safetensors.origin import FILE as ORIGIN_FILE
from glmconv.plan.moves import part_moves
from glmconv.plan.plan import Move, Payload, TargetFile
from glmconv.plan.side_files import find_side_files, grouped
from glmconv.source.locate import Located
from glmconv.source.manifest import FILE as MANIFEST_FILE
from glmconv.source.source import Source
from glmconv.storage.local import identify
from glmconv.storage.objects import StorageObject
from glmconv.tables.config import DTYPE_FIELDS
from glmconv.tables.expand import Layout, Part, view2d


@dataclass(slots=True)
class DtypePolicy:
    """Which dtype a tensor is stored in.

    Bytes keep the source's dtype; ``cast`` changes all but the locked tensors. Locked tensors are
    widened on the way to Megatron (exact) and get back what ``widened`` says on the way out.
    """

    to_megatron: bool
    cast: DType | None = None
    widened: Mapping[str, DType] = field(default_factory=dict)

    def stored(self, located: Located) -> DType:
        lock, source = located.tensor.lock, located.dtype
        if lock is None:
            return self.cast or source
        if self.to_megatron:
            return lock if source.itemsize < lock.itemsize else source
        return self.widened.get(located.tensor.name, source)


@dataclass(slots=True)
class Draft:
    """A plan's targets in the making. ``repeated`` payloads copy bytes that others use too."""

    sources: list[StorageObject]
    targets: list[TargetFile] = field(default_factory=list)
    repeated: set[str] = field(default_factory=set)
    widened: dict[str, DType] = field(default_factory=dict)
    defects: list[Defect] = field(default_factory=list)
    warnings: list[Defect] = field(default_factory=list)


class Parts:
    """The parts of a layout that the source can fill, by stored tensor, with their dtype."""

    def __init__(self, source: Source, layout: Layout, policy: DtypePolicy, draft: Draft) -> None:
        self.source, self.layout, self.policy, self.draft = source, layout, policy, draft
        self.groups: dict[str, list[Part]] = {}
        for part in layout.parts:
            if self._present(part):
                self.groups.setdefault(part.stored, []).append(part)

    def _present(self, part: Part) -> bool:
        absent = [tensor.name for tensor, _ in part.slots if tensor.name not in self.source.tensors]
        if absent and len(absent) < len(part.slots):
            self.draft.defects.append(
                Defect("missing", f"cannot be made without {', '.join(absent)}", part.stored)
            )
        return not absent

    def __iter__(self) -> Iterator[tuple[str, list[Part], DType]]:
        """Stored tensors with their parts and dtype; ill-fitting ones become defects of the draft."""
        for name, parts in self.groups.items():
            extent = prod(self.layout.axes[name])
            if len(parts) < extent:
                self.draft.defects.append(
                    Defect("missing", f"only {len(parts)} of {extent} elements are there", name)
                )
                continue
            dtype = self._dtype(name, parts)
            if dtype is not None:
                yield name, parts, dtype

    def _dtype(self, name: str, parts: list[Part]) -> DType | None:
        dtypes = set()
        for part in parts:
            for tensor, _ in part.slots:
                located = self.source.tensors[tensor.name]
                wanted = self.policy.stored(located)
                dtypes.add(wanted)
                if tensor.lock is not None and wanted is not located.dtype and self.policy.to_megatron:
                    self.draft.widened[tensor.name] = located.dtype
        if len(dtypes) == 1:
            return dtypes.pop()
        labels = ", ".join(sorted(dtype.label for dtype in dtypes))
        self.draft.defects.append(
            Defect("dtype", f"its sources have different dtypes: {labels}", name, "--dtype makes them one")
        )
        return None

    def moves(self, part: Part, rows: tuple[int, int], dtype: DType) -> tuple[Move, ...]:
        return part_moves(part, rows, self.source.tensors, dtype)


def whole_tensor_moves(parts: Parts, group: list[Part], dtype: DType) -> tuple[Move, ...]:
    """Moves that fill one contiguous tensor, its elements one after the other."""
    if len(group) == 1:
        return parts.moves(group[0], (0, view2d(group[0].shape)[0]), dtype)
    size = prod(group[0].shape) * dtype.itemsize
    moves: list[Move] = []
    for number, part in enumerate(sorted(group, key=lambda part: part.index)):
        for move in parts.moves(part, (0, view2d(part.shape)[0]), dtype):
            moves.append(_shifted(move, number * size))
    return tuple(moves)


def _shifted(move: Move, by: int) -> Move:
    return Move(
        move.src,
        move.src_offset,
        move.dst_offset + by,
        move.run,
        move.count,
        move.src_stride,
        move.dst_stride,
        move.cast,
    )


def add_side_files(draft: Draft, source: Source, folder: str, changes: Mapping[str, Any]) -> None:
    """Copy config, tokenizer, licence and code byte for byte into ``folder`` of the unit.

    What is neither that nor weights nor a trainer's is named in a warning.

    ``config.json`` is rewritten only where ``changes`` says that the weights changed.
    """
    if source.config_from_args:
        text = json.dumps({**source.config, **changes}, indent=2) + "\n"
        draft.targets.append(literal_file(f"{folder}config.json", text.encode()))
    if source.hf_dir is None:
        return
    side = find_side_files(source.hf_dir)
    if side.left:
        what = f"left behind, since they are no side files of a checkpoint: {grouped(side.left)}"
        draft.warnings.append(Defect("side-file", what, str(source.hf_dir), severity="warning"))
    for name in side.files:
        if name.parts[0] in (MANIFEST_FILE, ORIGIN_FILE):
            what = "lies in a directory that has the name of a file that glmconv writes"
            draft.defects.append(Defect("side-file", what, str(source.hf_dir / name), "rename the directory"))
            continue
        target = f"{folder}{name.as_posix()}"
        if changes and name == Path("config.json"):
            text = json.dumps({**source.config, **changes}, indent=2) + "\n"
            draft.targets.append(literal_file(target, text.encode()))
            continue
        file = identify(source.hf_dir / name)
        draft.sources.append(file)
        whole = TargetFile(target, file.size)
        if file.size:
            move = Move(len(draft.sources) - 1, 0, 0, file.size)
            whole.payloads.append(Payload(target, DType.U8, (file.size,), 0, file.size, (move,)))
        draft.targets.append(whole)


def literal_file(path: str, data: bytes) -> TargetFile:
    """A file whose bytes are all known from the plan."""
    return TargetFile(path, len(data), literals=[(0, data)] if data else [])


def saved_dtype(source: Source, cast: DType | None) -> DType:
    """The dtype of the bulk of the weights as they are written: what their config has to say."""
    return cast or source.bulk_dtype


def config_changes(source: Source, cast: DType | None, drop_mtp: bool) -> dict[str, Any]:
    """Fields of ``config.json`` that do not describe the weights that are written, with right values.

    ``dtype`` is that of what is saved, as with ``save_pretrained``, wherever the config says one.
    """
    saved = saved_dtype(source, cast).torch_name
    dtypes = _with_dtype(source.config, saved)
    text = source.config.get("text_config")
    if isinstance(text, dict) and (inner := _with_dtype(text, saved)):
        dtypes["text_config"] = {**text, **inner}
    if not dtypes and saved != source.spec.dtype:
        dtypes["torch_dtype"] = saved
    changes = {**source.changes, **dtypes}
    field = source.bridge.mtp_field
    if drop_mtp and field is not None and source.config.get(field) != 0:
        changes[field] = 0
    return changes


def _with_dtype(config: Mapping[str, Any], saved: str) -> dict[str, Any]:
    given = {name: config[name] for name in DTYPE_FIELDS if config.get(name) is not None}
    return {name: saved for name, value in given.items() if str(value).removeprefix("torch.") != saved}
