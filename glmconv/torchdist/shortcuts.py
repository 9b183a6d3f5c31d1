"""Fast paths through the three kinds of object that fill a ``.metadata`` file.

A checkpoint of 60,000 tensors holds 200,000 of them, some 10 million opcodes. Their opcodes always
come in the same order, so a regular expression reads a whole object at once, and only where it
matches exactly; anything else goes through the opcodes one by one.
"""

from __future__ import annotations

import re
from typing import Any

from glmconv.torchdist.machine import SKIPPED, Global, Machine, Node, Shortcut

TENSOR = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
PROPERTIES = "torch.distributed.checkpoint.metadata.TensorProperties"
CHUNK = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata"
INDEX = "torch.distributed.checkpoint.metadata.MetadataIndex"
STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"

FIELDS = {
    CHUNK: ("offsets", "sizes"),
    INDEX: ("fqn", "offset", "index"),
    STORED: ("relative_path", "offset", "length", "transform_descriptors"),
}
"""Attributes of the small classes, as ``Policy.fields`` takes them."""

_GET = rb"(h.|j....)"
_TEXT = rb"(h.|j....|\x8c.[ -~]+\x94)"
_INT = rb"(K.|M..|J....|\x8a\x05.....|\x8a\x06......)"
# A torch.Size, made in place (the global, then its tuple) or fetched.
_SIZE = _GET + rb"(?:(\(?(?:K.|M..|J....|\x8a\x05.....)*[\x85-\x87t])\x94\x85\x94R\x94)?"
_BEGIN = rb"\x94}\x94\("
# TensorProperties, made in place (its class, then its state) or fetched.
_PROPERTIES = rb"(?:\)\x81\x94\(" + _GET + _GET + rb"[\x88\x89]" + _GET + rb"[\x88\x89]t\x94b)?"
_TENSOR = re.compile(_BEGIN + _GET + _GET + _PROPERTIES + _GET + _SIZE + _GET + rb"\]\x94", re.DOTALL)
_CHUNK = re.compile(_BEGIN + _GET + _SIZE + _GET + _SIZE + rb"ub", re.DOTALL)
_INDEX = _BEGIN + _GET + _TEXT + _GET + rb"(?:N|K.|M..|J....)" + _GET + _SIZE + rb"ub"
_STORED = _GET + rb"\)\x81" + _BEGIN + _GET + _TEXT + _GET + _INT + _GET + _INT + rb"ub"
_PLACE = re.compile(_INDEX + _STORED, re.DOTALL)
_PLACE_KEYS = ("fqn", "index", "offset", STORED, "relative_path", "offset", "length")
_OPERAND = {ord("K"): 1, ord("M"): 2, ord("J"): 4}


class Shortcuts:
    """The fast paths of one read, with what they learnt about its memo."""

    def __init__(self) -> None:
        self._dims: dict[bytes, tuple[int, ...] | None] = {}
        self._known: dict[str, set[tuple[bytes, ...]]] = {CHUNK: set(), INDEX: set(), TENSOR: set()}
        self._texts: dict[bytes, str] = {}

    def table(self) -> dict[str, Shortcut]:
        """Fast path of each global, as ``Policy.shortcuts`` takes it."""
        return {CHUNK: self._chunk, INDEX: self._place, TENSOR: self._tensor}

    def _chunk(self, machine: Machine) -> bool:
        """A chunk: offsets and sizes."""
        match = _CHUNK.match(machine.data, machine.pos)
        if match is None:
            return False
        key, size, raw, other_key, other_size, other_raw = match.groups()
        offsets, sizes = self._shape(machine, size, raw), self._shape(machine, other_size, other_raw)
        known = self._knows(machine, CHUNK, (key, other_key), ("offsets", "sizes"))
        if offsets is None or sizes is None or not known:
            return False
        node = machine.stack[-1] = Node(machine.stack[-1], (), (offsets, sizes))
        machine.memo += (node, SKIPPED)
        _remember(machine, offsets, raw)
        _remember(machine, sizes, other_raw)
        machine.pos = match.end()
        return True

    def _tensor(self, machine: Machine) -> bool:
        """A tensor's properties and shape, up to its empty list of chunks."""
        match = _TENSOR.match(machine.data, machine.pos)
        if match is None:
            return False
        key, cls, dtype, layout, memory, size_key, size, raw, chunks_key = match.groups()
        shape, properties = self._shape(machine, size, raw), _memo(machine, cls)
        known = self._knows(machine, TENSOR, (key, size_key, chunks_key), ("properties", "size", "chunks"))
        if dtype is not None and isinstance(properties, Global):
            properties = Node(properties, (), tuple(_memo(machine, get) for get in (dtype, layout, memory)))
        if (
            shape is None
            or not known
            or not isinstance(properties, Node)
            or properties.target.path != PROPERTIES
        ):
            return False
        stack, memo = machine.stack, machine.memo
        attributes: dict[Any, Any] = {}
        chunks: list[Any] = []
        node = stack[-1] = Node(stack[-1], ())
        stack.append(attributes)
        machine.marks.append(len(stack))
        stack += ("properties", properties, "size", shape, "chunks", chunks)
        memo += (node, attributes) if dtype is None else (node, attributes, properties, SKIPPED)
        _remember(machine, shape, raw)
        memo.append(chunks)
        machine.pos = match.end()
        return True

    def _place(self, machine: Machine) -> bool:
        """A chunk's key and, behind it, the place of its record."""
        match = _PLACE.match(machine.data, machine.pos)
        if match is None:
            return False
        fqn_key, fqn, key, offset_key, size, raw, *rest = match.groups()
        cls, path_key, path, start_key, start, length_key, length = rest
        offset, name, file = (
            self._shape(machine, size, raw),
            self._text(machine, fqn),
            self._text(machine, path),
        )
        keys = (fqn_key, key, offset_key, cls, path_key, start_key, length_key)
        known = self._knows(machine, INDEX, keys, _PLACE_KEYS)
        if offset is None or name is None or file is None or not known:
            return False
        stack, memo = machine.stack, machine.memo
        index = stack[-1] = Node(stack[-1], (), (name, offset, None))
        stored = Node(_memo(machine, cls), (), (file, _integer(start), _integer(length), None))
        stack.append(stored)
        memo += (index, SKIPPED) if fqn[0] != 0x8C else (index, SKIPPED, name)
        _remember(machine, offset, raw)
        memo += (stored, SKIPPED) if path[0] != 0x8C else (stored, SKIPPED, file)
        machine.pos = match.end()
        return True

    def _knows(self, machine: Machine, kind: str, gets: tuple[bytes, ...], expected: tuple[str, ...]) -> bool:
        """Whether the memo holds these texts, and globals of these paths, there.

        It only grows, so to have seen it once is enough.
        """
        known = self._known[kind]
        if gets in known:
            return True
        for get, text in zip(gets, expected, strict=True):
            value = _memo(machine, get)
            if (value.path if isinstance(value, Global) else value) != text:
                return False
        known.add(gets)
        return True

    def _shape(self, machine: Machine, get: bytes, raw: bytes | None) -> tuple[int, ...] | None:
        """A ``torch.Size`` made of ``raw`` by the global that ``get`` fetches, or fetched itself."""
        value = _memo(machine, get)
        if raw is None:
            return value if isinstance(value, tuple) else None
        return self._dimensions(raw) if isinstance(value, Global) and value.path == "torch.Size" else None

    def _text(self, machine: Machine, raw: bytes) -> str | None:
        """A text given in place or fetched from the memo; equal texts become one object."""
        if raw[0] != 0x8C:
            value = _memo(machine, raw)
            return value if isinstance(value, str) else None
        known = self._texts.get(raw)
        if known is None and raw[1] == len(raw) - 3:
            known = self._texts[raw] = raw[2:-1].decode("ascii")
        return known

    def _dimensions(self, raw: bytes) -> tuple[int, ...] | None:
        """The tuple that these opcodes make; None if they make something else."""
        try:
            return self._dims[raw]
        except KeyError:
            pass
        values: list[int] = []
        marked = raw[0] == ord("(")
        pos = int(marked)
        while pos < len(raw) - 1:
            width = 1 + _OPERAND.get(raw[pos], 6)
            values.append(_integer(raw[pos : pos + width]))
            pos += width
        whole = raw[-1] == ord("t") if marked else raw[-1] - 0x84 == len(values)
        return self._dims.setdefault(raw, tuple(values) if whole else None)


def _memo(machine: Machine, get: bytes) -> Any:
    """What a BINGET or LONG_BINGET fetches, or None."""
    index = get[1] if len(get) == 2 else int.from_bytes(get[1:], "little")
    return machine.memo[index] if index < len(machine.memo) else None


def _remember(machine: Machine, shape: tuple[int, ...], raw: bytes | None) -> None:
    """What the memo gains by a ``torch.Size`` made in place: its tuple, the arguments, itself."""
    if raw is not None:
        machine.memo += (shape, SKIPPED, shape)


def _integer(raw: bytes) -> int:
    """Value of an integer opcode with its operand."""
    code = raw[0]
    if code == 0x4B:
        return raw[1]
    if code == 0x8A:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little", signed=code == 0x4A)
