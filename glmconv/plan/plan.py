"""The plan of a conversion: every byte of the output, known before the first byte moves.

A plan is pure data. It is the same for every filesystem and every number of workers; its digest
identifies a run for resuming. The engine reads a plan and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from glmconv.basics.dtypes import DType
from glmconv.source.conditions import Condition, Dropped
from glmconv.storage.objects import StorageObject

PLAN_FORMAT = 3
"""Raised whenever the meaning of a plan or journal changes: then no unfinished run of before is continued."""

HASH_LEAF = 4 << 20
"""Bytes of payload under one leaf of a tensor's hash tree (fixed: hashes depend on it)."""


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` runs of ``run`` bytes from a source file into a target payload.

    Run ``i`` reads ``run`` bytes at ``src_offset + i * src_stride`` of source file ``src`` and
    lands at ``dst_offset + i * dst_stride`` of the payload (offsets count from the payload's
    start). With ``cast`` the run is measured in *source* bytes, the strides each in their own
    side's bytes, and elements are converted one by one.
    """

    src: int
    src_offset: int
    dst_offset: int
    run: int
    count: int = 1
    src_stride: int = 0
    dst_stride: int = 0
    cast: tuple[DType, DType] | None = None

    @property
    def src_bytes(self) -> int:
        return self.run * self.count

    @property
    def dst_run(self) -> int:
        """Bytes that one run covers in the payload."""
        if self.cast is None:
            return self.run
        return self.run // self.cast[0].itemsize * self.cast[1].itemsize


@dataclass(slots=True)
class Payload:
    """The data bytes of one stored tensor (or one chunk of it) in a target file.

    ``name`` is the name in the target layout, ``place`` tells chunks of one tensor apart (the
    chunk's offsets, as torch's distributed checkpoint counts them). Bytes that no move covers
    are zero (padding rows of a vocabulary); ``zeros`` counts them. ``moves`` are sorted by
    ``dst_offset`` and do not overlap.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    size: int
    moves: tuple[Move, ...]
    place: tuple[int, ...] = ()
    zeros: int = 0


@dataclass(slots=True)
class TargetFile:
    """A file of the output. ``literals`` are the bytes between payloads: (offset, bytes).

    ``path`` is relative to the published unit. ``size`` is the whole file's.
    """

    path: str
    size: int
    payloads: list[Payload] = field(default_factory=list)
    literals: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """Sources, targets and what stays behind.

    ``asked`` are the options that the plan was made by, under their names on the command line.
    ``digest`` identifies the plan (see :func:`plan_digest`).
    """

    sources: list[StorageObject]
    targets: list[TargetFile]
    conditions: list[Condition] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def target_bytes(self) -> int:
        return sum(target.size for target in self.targets)

    @property
    def payload_bytes(self) -> int:
        return sum(payload.size for _, payload in self.payloads())

    def payloads(self) -> Iterator[tuple[TargetFile, Payload]]:
        """All payloads, in the order of targets and offsets."""
        for target in self.targets:
            for payload in target.payloads:
                yield target, payload


def plan_digest(plan: Plan) -> str:
    """xxh3_128 over all of a plan: every source's identity, in order, the options, each byte's origin.

    Two runs with one digest read the same objects and write the same bytes, so one may go on where
    the other stopped.
    """
    hasher = xxhash.xxh3_128(repr(PLAN_FORMAT).encode())
    for source in plan.sources:
        hasher.update(repr(source.identity).encode())
    for target in plan.targets:
        hasher.update(repr((target.path, target.size)).encode())
        for offset, data in target.literals:
            hasher.update(offset.to_bytes(8, "little"))
            hasher.update(data)
        for payload in target.payloads:
            hasher.update(_payload_key(payload))
    hasher.update(repr((plan.conditions, plan.dropped, sorted(plan.asked.items()))).encode())
    return hasher.hexdigest()


def _payload_key(payload: Payload) -> bytes:
    moves = [
        (m.src, m.src_offset, m.dst_offset, m.run, m.count, m.src_stride, m.dst_stride)
        + ((m.cast[0].label, m.cast[1].label) if m.cast else ())
        for m in payload.moves
    ]
    fields = (payload.name, payload.dtype.label, payload.shape, payload.place, payload.offset, payload.size)
    return repr((fields, payload.zeros, moves)).encode()


def leaves(size: int) -> Sequence[tuple[int, int]]:
    """Start and end of each hash leaf of a payload of ``size`` bytes."""
    return [(start, min(start + HASH_LEAF, size)) for start in range(0, size, HASH_LEAF)]
