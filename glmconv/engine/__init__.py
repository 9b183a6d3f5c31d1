"""The engine: carries out a plan, byte by byte, and decides nothing.

The straight line of a caller::

    place = destination(dst, unit, sources=[src])                 # refuses before any work
    place.check_final()
    place.prepare()
    with StagingLock(place.staging) as lock:
        require_space(place.staging, space_needed(plan, place.staging, "auto"))
        outcome = execute(plan, place.staging, guard=lock.check)  # fills unit_dir(place.staging)
        ...                                                       # caller adds the manifest
        publish(place, guard=lock.check)                          # flushed, one rename
        set_tracker(place.dst, "release", place.staging)
        clean_up(place.staging)
        lock.remove_with_directory()

``Outcome.leaves[(target path, payload index)]`` holds a payload's leaf digests (16 bytes each,
concatenated); ``Outcome.digest(path, index)`` is the payload's own digest.
"""

from __future__ import annotations

from glmconv.engine.clone import clone_refusal
from glmconv.engine.conditions import check_conditions
from glmconv.engine.hashes import DIGEST_BYTES, LeafHasher, hash_range, tree_digest
from glmconv.engine.lock import StagingLock
from glmconv.engine.outcome import CopyMode, HashMode, Outcome, Progress, Stop
from glmconv.engine.places import Destination, destination, require_space, unit_dir
from glmconv.engine.publishing import (
    State,
    clean_up,
    is_of,
    publish,
    recognise,
    reopen,
    restore_old,
    write_atomically,
)
from glmconv.engine.run import execute
from glmconv.engine.space import space_needed, space_taken
from glmconv.engine.tracker import TRACKER, Tracked, read_tracker, set_tracker

__all__ = [
    "DIGEST_BYTES",
    "TRACKER",
    "CopyMode",
    "Destination",
    "HashMode",
    "LeafHasher",
    "Outcome",
    "Progress",
    "StagingLock",
    "State",
    "Stop",
    "Tracked",
    "check_conditions",
    "clean_up",
    "clone_refusal",
    "destination",
    "execute",
    "hash_range",
    "is_of",
    "publish",
    "read_tracker",
    "recognise",
    "reopen",
    "require_space",
    "restore_old",
    "set_tracker",
    "space_needed",
    "space_taken",
    "tree_digest",
    "unit_dir",
    "write_atomically",
]
