"""Pickle opcodes, written directly: the counterpart of ``pickles`` for the few forms that we write."""

from __future__ import annotations

from collections.abc import Sequence

MANY_PIECES = 1 << 16
"""Opcodes that are kept apart at most."""


def integer(value: int) -> bytes:
    """The shortest of pickle's integers, as C ``pickle`` picks it (protocol 2 and later)."""
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def text(value: str) -> bytes:
    """BINUNICODE (protocol 1 and later)."""
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def named(module: str, name: str) -> bytes:
    """GLOBAL: a class or function."""
    return f"c{module}\n{name}\n".encode()


def plain_tuple(values: Sequence[bytes]) -> bytes:
    """A tuple of values that are opcodes already."""
    if len(values) > 3:
        return b"(" + b"".join(values) + b"t"
    return b"".join(values) + (b")", b"\x85", b"\x86", b"\x87")[len(values)]


class PickleWriter:
    """A pickle of protocol 4 under construction, with a memo for what comes again.

    ``out`` takes opcodes. Methods return them; each MEMOIZE opcode must be asked for in the order
    in which it is written, since the memo counts them.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._memo: dict[object, bytes] = {}
        self._next = 0

    def memoize(self, key: object = None) -> bytes:
        """MEMOIZE; under a key, :meth:`known` gives the reference from now on."""
        if key is not None:
            index = self._next
            self._memo[key] = b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")
        self._next += 1
        return b"\x94"

    def known(self, key: object) -> bytes | None:
        """The reference to what was memoized under ``key``."""
        return self._memo.get(key)

    def text(self, value: str) -> bytes:
        """A text; the same text again is a reference."""
        known = self._memo.get(value)
        if known is not None:
            return known
        encoded = value.encode()
        size = len(encoded)
        opcodes = b"\x8c" + bytes([size]) if size < 256 else b"X" + size.to_bytes(4, "little")
        return opcodes + encoded + self.memoize(value)

    def named(self, module: str, name: str) -> bytes:
        """A class or function."""
        known = self._memo.get((module, name))
        if known is not None:
            return known
        return self.text(module) + self.text(name) + b"\x93" + self.memoize((module, name))

    def begin(self, module: str, name: str) -> bytes:
        """An object of a class and the begin of its attributes, which ``ub`` closes."""
        return self.named(module, name) + b")\x81" + self.memoize() + b"}" + self.memoize() + b"("

    def gather(self) -> None:
        """Join the opcodes so far where they are many: as small pieces they take ten times their bytes."""
        if len(self.out) > MANY_PIECES:
            self.out[:] = [b"".join(self.out)]

    def pickle(self) -> bytes:
        """The whole pickle, as one frame."""
        body = b"".join(self.out) + b"."
        return b"\x80\x04\x95" + len(body).to_bytes(8, "little") + body
