"""Lay out an HF checkpoint: shards, headers, index, side files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect
from glmconv.formats.safetensors.checkpoint import INDEX, SINGLE
from glmconv.formats.safetensors.header import PAGE, HeaderEntry, write_header
from glmconv.formats.safetensors.origin import Origin, fits
from glmconv.plan.draft import Draft, DtypePolicy, Parts, add_side_files, literal_file, whole_tensor_moves
from glmconv.plan.plan import Move, Payload, TargetFile
from glmconv.source.source import Source
from glmconv.tables.expand import Layout, expand_tied

DEFAULT_SHARD = 5_000_000_000
"""Bytes of data in a shard, as transformers writes them by default."""

LONG_MOVE = 1 << 16
"""Bytes of a move from which on it is worth having its blocks shared."""


@dataclass(slots=True)
class _Tensor:
    name: str
    dtype: DType
    shape: tuple[int, ...]
    moves: tuple[Move, ...]
    zeros: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def draft_hf(
    source: Source,
    layout: Layout,
    policy: DtypePolicy,
    *,
    max_shard_size: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Draft:
    """Draft an HF checkpoint in ``layout`` (hub names or stacked experts).

    Where the origin's shards are known and hold exactly these tensors they are written again byte
    for byte, unless ``max_shard_size`` (bytes) asks for other shards.
    """
    draft = Draft(list(source.files))
    tensors = _tensors(source, layout, policy, draft)
    described = {name: (one.dtype.label, one.shape) for name, one in tensors.items()}
    if max_shard_size is None and source.origin is not None and fits(source.origin, described):
        _as_origin(draft, tensors, source.origin)
    else:
        _own_shards(draft, list(tensors.values()), max_shard_size or DEFAULT_SHARD)
    add_side_files(draft, source, "", changes or {})
    return draft


def _tensors(source: Source, layout: Layout, policy: DtypePolicy, draft: Draft) -> dict[str, _Tensor]:
    parts = Parts(source, layout, policy, draft)
    tensors = {}
    for name, group, dtype in parts:
        shape = (*layout.axes[name], *group[0].shape)
        zeros = all(source.tensors[one.name].zeros for part in group for one, _ in part.slots)
        tensors[name] = _Tensor(name, dtype, shape, whole_tensor_moves(parts, group, dtype), zeros)
    kept = source.origin.names() if source.origin is not None else set()
    for name, to in expand_tied(source.table, source.spec).items():
        if name in kept and to in tensors:
            one = tensors[to]
            tensors[name] = _Tensor(name, one.dtype, one.shape, one.moves)
            draft.repeated.add(name)
    return tensors


def _shard(path: str, head: bytes, entries: Sequence[tuple[int, _Tensor]]) -> TargetFile:
    """A file of ``head`` and tensors at offsets counted from the start of the data."""
    shard = TargetFile(path, len(head), literals=[(0, head)])
    for begin, tensor in entries:
        at, zeros = len(head) + begin, tensor.size if tensor.zeros else 0
        shard.payloads.append(
            Payload(tensor.name, tensor.dtype, tensor.shape, at, tensor.size, tensor.moves, zeros=zeros)
        )
        shard.size = max(shard.size, len(head) + begin + tensor.size)
    return shard


def _as_origin(draft: Draft, tensors: Mapping[str, _Tensor], origin: Origin) -> None:
    for name, header in origin.headers.items():
        entries: list[HeaderEntry] = sorted(header.entries, key=lambda entry: (entry.begin, entry.end))
        head = len(header.text).to_bytes(8, "little") + header.text
        draft.targets.append(_shard(name, head, [(entry.begin, tensors[entry.name]) for entry in entries]))
    if origin.index is not None:
        draft.targets.append(literal_file(INDEX, origin.index))


def _own_shards(draft: Draft, tensors: Sequence[_Tensor], limit: int) -> None:
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=_natural_order):
        if shards[-1] and filled + tensor.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    if not tensors:
        draft.defects.append(Defect("missing", "the checkpoint holds no tensor"))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        name = SINGLE if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Wide elements first, so that every tensor is aligned to its element size.
        ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        described = ((t.name, t.dtype, t.shape) for t in ordered)
        head = write_header(described, {"format": "pt"}, _residue(ordered))
        at, entries = 0, []
        for tensor in ordered:
            entries.append((at, tensor))
            at += tensor.size
        draft.targets.append(_shard(name, head, entries))
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        draft.targets.append(literal_file(INDEX, (json.dumps(content, indent=2) + "\n").encode()))


def _natural_order(tensor: _Tensor) -> list[tuple[int, str]]:
    """Layer by layer, layer 2 before layer 10: a reader of one layer then opens one shard or two."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in tensor.name.split(".")]


def _residue(tensors: Sequence[_Tensor]) -> int | None:
    """Where data must begin modulo a page so that more than half of it lies as it does in the sources.

    safetensors knows no gaps, so all tensors of a file move together: one residue a file can match.
    None where there is no such residue, as in a torch_dist whose records lie anywhere.
    """
    matching: Counter[int] = Counter()
    at = 0
    for tensor in tensors:
        for move in tensor.moves:
            if move.count == 1 and move.cast is None and move.run >= LONG_MOVE:
                matching[(move.src_offset - move.dst_offset - at) % PAGE] += move.run
        at += tensor.size
    residue, size = max(matching.items(), key=lambda item: item[1], default=(1, 0))
    return residue if 2 * size > at and residue % 8 == 0 else None
