"""How much of a disk a plan will take: asked before any work, so that a run does not end in the middle."""

from __future__ import annotations

import os
from pathlib import Path

from glmconv.engine.clone import MIN_CLONE, Sharing, block_size
from glmconv.engine.segments import LONG_RUN, normalized
from glmconv.plan.plan import Move, Payload, Plan
from glmconv.storage.errors import storage_error
from glmconv.storage.opened import examine_all

CLONE_COST = 2 * 4096
"""Bytes of the filesystem's own records that one cloned range takes, as measured on XFS and btrfs."""


def space_needed(plan: Plan, directory: Path, copy_mode: str) -> int:
    """Bytes that writing the plan into ``directory`` will take there, at most roughly.

    Ranges that can be cloned take next to none, holes of a sparse source none at all. Under ``auto``
    a range that is refused later is copied all the same, so this is an estimate, not a promise.
    Raises StorageError where ``clone`` is impossible or a source is gone, DataError where one has changed.
    """
    standings = examine_all(plan.sources)
    sharing = Sharing(copy_mode, directory, server_copy=False)
    sharing.probe(plan.sources, directory)
    block = block_size(directory)
    cloning = [sharing.may_clone(standing.device) for standing in standings]
    written = [0] * len(standings)
    need = plan.target_bytes
    for _, payload in plan.payloads():
        for move in payload.moves:
            cloned = _cloned(payload, normalized(move), block) if cloning[move.src] else 0
            need -= max(0, cloned - CLONE_COST * move.count)
            if move.cast is None:
                written[move.src] += move.src_bytes - cloned
    return need - sum(min(one.holes, size) for one, size in zip(standings, written, strict=True))


def space_taken(directory: Path) -> int:
    """Bytes of the disk that the files under ``directory`` take now. Raises StorageError."""
    taken = 0
    for folder, _, names in os.walk(directory):
        for path in (os.path.join(folder, name) for name in names):
            try:
                taken += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue  # a network filesystem's leftover of an unlinked file, gone since it was listed
            except OSError as error:
                raise storage_error(error, path, "look at what an earlier run wrote") from error
    return taken


def _cloned(payload: Payload, move: Move, block: int) -> int:
    """Bytes of whole blocks in a move whose source and target lie alike in their blocks."""
    at = payload.offset + move.dst_offset
    strides = 0 if move.count == 1 else move.src_stride - move.dst_stride
    alone = move.count == 1 or move.run >= LONG_RUN
    if move.cast is not None or not alone or (move.src_offset - at) % block or strides % block:
        return 0
    middle = (move.run - -at % block) // block * block
    return middle * move.count if middle >= MIN_CLONE else 0
