"""What a run is asked and what it tells: modes, the stop request, progress and the outcome."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from glmconv.basics.errors import Interrupted
from glmconv.engine.hashes import tree_digest
from glmconv.engine.rounding import Rounding

CopyMode = Literal["auto", "clone", "copy"]
HashMode = Literal["full", "none"]


class Stop:
    """A request to end early. A signal handler may set it: it takes no lock.

    ``deferred`` is true while work is under way that ends cleanly by itself once it sees the request;
    otherwise the handler may raise at once, since nothing was begun.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.deferred = False

    def request(self, signal_number: int = signal.SIGINT) -> None:
        self.signal_number = signal_number

    def is_set(self) -> bool:
        return self.signal_number != 0

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Work that looks at the request itself and ends cleanly."""
        self.deferred = True
        try:
            yield
        finally:
            self.deferred = False

    def check(self) -> None:
        """Raise Interrupted where the request was made."""
        if self.is_set():
            raise Interrupted(self.signal_number, hint="run the same command again: it resumes")


@dataclass(frozen=True, slots=True)
class Progress:
    """Payload bytes done (``reused`` ones included) of ``total``, and seconds since the start."""

    done: int
    total: int
    reused: int
    seconds: float


@dataclass(slots=True)
class Outcome:
    """What a run did. Bytes are payload bytes by the way they came; they add up to the plan's.

    ``bytes_zero`` counts padding and holes of sparse sources, ``bytes_reused`` what an earlier run
    had finished, ``bytes_literal`` (beside the sum) what lies between payloads. ``clone_reason`` says
    why bytes were copied that might have been cloned; empty when nothing was refused.
    ``bytes_reread`` were read for their hash alone, in ``reread_seconds`` of the workers' time.
    ``rounding`` tells by stored name what casts lost. ``run`` names the run; both are over all its
    interruptions. ``leaves[(target path, payload index)]`` holds leaf digests, 16 bytes each, put end to end.
    """

    run: str
    copy_mode: CopyMode
    hash_mode: HashMode
    bytes_cloned: int
    bytes_copied: int
    bytes_computed: int
    bytes_zero: int
    bytes_literal: int
    bytes_reused: int
    bytes_reread: int
    reread_seconds: float
    seconds: float
    clone_reason: str
    rounding: dict[str, Rounding]
    leaves: dict[tuple[str, int], bytes] = field(repr=False)

    def copying(self) -> dict[str, Any]:
        """How bytes were moved and what the hashes cost, as plain data."""
        return {
            "mode": self.copy_mode,
            "not_cloned": self.clone_reason,
            "hash": self.hash_mode,
            "reread_bytes": self.bytes_reread,
            "reread_seconds": round(self.reread_seconds, 3),
        }

    def digest(self, path: str, index: int) -> bytes:
        """Digest of payload ``index`` of target ``path``. KeyError when the run did not hash."""
        return tree_digest(self.leaves[path, index])
