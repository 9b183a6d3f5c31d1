"""The engine: carries out a :class:`glmconv.plan.Plan`, byte by byte, and decides nothing.

The straight line of a caller::

    place = destination(dst, unit, sources=[src], overwrite=overwrite)   # refuses before any work
    with StagingLock(place.staging):
        require_space(place.staging, space_needed(plan, place.staging, "auto"))
        outcome = execute(plan, place.staging, workers=2, stop=stop)     # fills unit_dir(place.staging)
        ...                                                              # caller adds metadata, manifest
        publish(place.staging, place.final, overwrite=overwrite)         # fsync, one rename
    write_tracker(dst, "release")

Signatures::

    execute(plan: Plan, staging: Path, *, workers: int = 2, copy_mode: CopyMode = "auto",
            hash_mode: HashMode = "full", progress: Callable[[Progress], None] | None = None,
            stop: Stop | None = None, journal_bytes: int = 256 << 20, restart: bool = False) -> Outcome
    destination(dst: Path, unit: str | None, *, sources: Sequence[Path] = (),
                overwrite: bool = False) -> Destination     # unit None: the unit is dst itself
    unit_dir(staging: Path) -> Path
    publish(staging: Path, final: Path, *, overwrite: bool = False) -> None
    discard(staging: Path) -> None
    write_tracker(root: Path, text: str) -> None
    require_space(path: Path, need: int) -> None
    space_needed(plan: Plan, directory: Path, copy_mode: CopyMode) -> int
    StagingLock(staging: Path)                              # context manager; StorageError when busy
    clone_refusal(source: Path | None, directory: Path) -> str | None
    tree_digest(leaf_digests: bytes) -> bytes
    hash_range(fd: int, offset: int, size: int) -> bytes    # leaf digests, 16 bytes each
    Stop().request(signal_number)                           # safe inside a signal handler

``Outcome.leaves[(target path, payload index)]`` holds a payload's leaf digests (16 bytes each,
concatenated); ``Outcome.digest(path, index)`` is the payload's own digest.
"""

from __future__ import annotations

from glmconv.engine.clone import clone_refusal
from glmconv.engine.hashes import DIGEST_BYTES, LeafHasher, hash_range, tree_digest
from glmconv.engine.lock import StagingLock
from glmconv.engine.outcome import CopyMode, HashMode, Outcome, Progress, Stop
from glmconv.engine.publish import (
    Destination,
    destination,
    discard,
    publish,
    require_space,
    unit_dir,
    write_atomically,
    write_tracker,
)
from glmconv.engine.run import execute
from glmconv.engine.space import space_needed

__all__ = [
    "DIGEST_BYTES",
    "CopyMode",
    "Destination",
    "HashMode",
    "LeafHasher",
    "Outcome",
    "Progress",
    "StagingLock",
    "Stop",
    "clone_refusal",
    "destination",
    "discard",
    "execute",
    "hash_range",
    "publish",
    "require_space",
    "space_needed",
    "tree_digest",
    "unit_dir",
    "write_atomically",
    "write_tracker",
]
