"""Reads ahead at the edges of clones: whole blocks are shared, but each edge would be a wait for the disk."""

from __future__ import annotations

import os

from glmconv.engine.clone import BLOCK, MIN_CLONE, Sharing
from glmconv.engine.slots import TargetSlots
from glmconv.storage.opened import OpenObjects

AHEAD = 128
"""Payloads whose edges are asked for before their turn: some 100 reads keep a disk busy."""


class EdgesAhead:
    """Asks the kernel for the edges of one worker's next payloads; nothing waits for the answer."""

    def __init__(self, sources: OpenObjects, sharing: Sharing) -> None:
        self._sources, self._sharing = sources, sharing
        self._slots: TargetSlots | None = None
        self._next = 0
        self._last = (-1, -1)

    def ask(self, slots: TargetSlots, first: int) -> None:
        """A job begins at slot ``first``. DataError or StorageError when a source cannot be opened."""
        index = slots.payload_at(first)
        if slots is not self._slots or self._next < index:
            self._slots, self._next = slots, index
        end = index + AHEAD
        for payload in slots.target.payloads[self._next : end]:
            for move in payload.moves:
                if move.count == 1 and move.cast is None and move.run >= MIN_CLONE:
                    self._read(move.src, move.src_offset)
                    self._read(move.src, move.src_offset + move.run - 1)
        self._next = end

    def _read(self, src: int, offset: int) -> None:
        """Ask for the block around a byte; neighbours in a file share it."""
        block = (src, offset // BLOCK)
        if block == self._last:
            return
        self._last = block
        source = self._sources.get(src)
        if source.local_fd is not None and self._sharing.may_clone(source.device):
            os.posix_fadvise(source.local_fd, offset, 1, os.POSIX_FADV_WILLNEED)
