"""Hashes of payloads: a tree over fixed blocks, so that bytes may be written in any order.

A leaf is the xxh3_128 digest (16 bytes, canonical order) of ``HASH_LEAF`` bytes of a payload (the
last one may be shorter). A payload's digest is the xxh3_128 of its leaf digests put end to end.
"""

from __future__ import annotations

from functools import cache

import xxhash

from glmconv.plan.plan import HASH_LEAF
from glmconv.storage.objects import OpenObject

DIGEST_BYTES = 16
ZERO_PAGE = memoryview(bytes(1 << 16))


def tree_digest(leaf_digests: bytes) -> bytes:
    """Digest of a payload from its leaf digests (16 bytes each, put end to end)."""
    return xxhash.xxh3_128(leaf_digests).digest()


@cache
def zero_leaf_digest() -> bytes:
    """Digest of a whole leaf of zeros: holes of sparse files are hashed without reading them."""
    return xxhash.xxh3_128(bytes(HASH_LEAF)).digest()


class LeafHasher:
    """Leaf digests of bytes that pass in order, from the start of a leaf on."""

    __slots__ = ("_digests", "_hash", "_position")

    def __init__(self) -> None:
        self._digests = bytearray()
        self._hash = xxhash.xxh3_128()
        self._position = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes; a piece may span any number of leaves."""
        while True:
            room = HASH_LEAF - self._position
            if len(data) < room:
                self._hash.update(data)
                self._position += len(data)
                return
            self._hash.update(data[:room])
            self._close()
            data = data[room:]

    def zeros(self, size: int) -> None:
        """Take ``size`` zero bytes; whole leaves of zeros cost nothing."""
        while size:
            if self._position == 0 and size >= HASH_LEAF:
                self._digests += zero_leaf_digest()
                size -= HASH_LEAF
                continue
            take = min(size, HASH_LEAF - self._position, len(ZERO_PAGE))
            self.update(ZERO_PAGE[:take])
            size -= take

    def end_payload(self) -> None:
        """Close the leaf at a payload's end, if one is open."""
        if self._position:
            self._close()

    def digests(self) -> bytes:
        """Digests of all closed leaves, put end to end."""
        return bytes(self._digests)

    def _close(self) -> None:
        self._digests += self._hash.digest()
        self._hash.reset()
        self._position = 0


def hash_range(source: OpenObject, offset: int, size: int) -> bytes:
    """Leaf digests of ``size`` bytes at ``offset`` of an open object.

    Raises DataError when the object ends before the range does.
    """
    hasher = LeafHasher()
    buffer = memoryview(bytearray(min(source.read_size, max(size, 1))))
    for done in range(0, size, len(buffer)):
        view = buffer[: size - done]
        source.read_into(view, offset + done)
        hasher.update(view)
    hasher.end_payload()
    return hasher.digests()
