"""Fast paths through the three kinds of object that fill a ``.metadata`` file.

A checkpoint of 60,000 tensors holds 200,000 of them, some 10 million opcodes. Their opcodes always
come in the same order, so a regular expression reads a whole object at once, and only where it
matches exactly; anything else goes through the opcodes one by one.
"""

from __future__ import annotations

import re
from typing import Any

from glmconv.formats.torchdist.pickle.machine import SKIPPED, Global, Machine, Node, Shortcut

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
_NEW = _GET + rb"\)\x81"
_TENSOR = re.compile(_BEGIN + _GET + _GET + _PROPERTIES + _GET + _SIZE + _GET + rb"\]\x94(\(?)", re.DOTALL)
_CHUNK_BODY = _BEGIN + _GET + _SIZE + _GET + _SIZE + rb"ub"
_CHUNK = re.compile(rb"()" + _CHUNK_BODY, re.DOTALL)
_NEXT_CHUNK = re.compile(_NEW + _CHUNK_BODY, re.DOTALL)
_INDEX = _BEGIN + _GET + _TEXT + _GET + rb"(?:N|K.|M..|J....)" + _GET + _SIZE + rb"ub"
_STORED = _NEW + _BEGIN + _GET + _TEXT + _GET + _INT + _GET + _INT + rb"ub"
_PLACE = re.compile(rb"()" + _INDEX + _STORED, re.DOTALL)
_NEXT_PLACE = re.compile(_NEW + _INDEX + _STORED, re.DOTALL)
_PLACE_KEYS = ("fqn", "index", "offset", STORED, "relative_path", "offset", "length", INDEX)
_OPERAND = {ord("K"): 1, ord("M"): 2, ord("J"): 4}


class Shortcuts:
    """The fast paths of one read, with what they learnt about its memo.

    Each is entered with the class on the stack, behind the opcode that makes an object of it.
    """

    def __init__(self) -> None:
        self._dims: dict[bytes, tuple[int, ...] | None] = {}
        self._known: dict[str, set[tuple[bytes, ...]]] = {CHUNK: set(), INDEX: set(), TENSOR: set()}
        self._sizes: set[bytes] = set()
        self._texts: dict[bytes, str] = {}

    def table(self) -> dict[str, Shortcut]:
        """Fast path of each global, as ``Policy.shortcuts`` takes it."""
        return {CHUNK: self._chunk, INDEX: self._places, TENSOR: self._tensor}

    def _chunk(self, machine: Machine) -> bool:
        """A chunk: offsets and sizes."""
        match = _CHUNK.match(machine.data, machine.pos)
        chunk = self._add_chunk(machine, match, machine.stack[-1]) if match else None
        if match is None or chunk is None:
            return False
        machine.stack[-1] = chunk
        machine.pos = match.end()
        return True

    def _add_chunk(self, machine: Machine, match: re.Match[bytes], cls: Global | None) -> Node | None:
        """Make a matched chunk and its memo; ``cls`` is None where the match fetches the class."""
        new, key, size, raw, other_key, other_size, other_raw = match.groups()
        offsets, sizes = self._shape(machine, size, raw), self._shape(machine, other_size, other_raw)
        if offsets is None or sizes is None:
            return None
        if (new, key, other_key) not in self._known[CHUNK]:
            expected = (CHUNK,) if cls is None else ()
            gets = (new, key, other_key) if cls is None else (key, other_key)
            if not self._knows(machine, gets, (*expected, "offsets", "sizes")):
                return None
            self._known[CHUNK].add((new, key, other_key))
        node = Node(_memo(machine, new) if cls is None else cls, (), (offsets, sizes))
        memo = machine.memo
        memo += (node, SKIPPED)
        if raw is not None:
            memo += (offsets, SKIPPED, offsets)
        if other_raw is not None:
            memo += (sizes, SKIPPED, sizes)
        return node

    def _tensor(self, machine: Machine) -> bool:
        """A tensor with its properties, its shape and up to a batch of chunks."""
        match = _TENSOR.match(machine.data, machine.pos)
        if match is None:
            return False
        memo, height = machine.memo, len(machine.memo)
        node = Node(machine.stack[-1], ())
        chunks: list[Any] = []
        memo += (node, SKIPPED)
        state = self._tensor_state(machine, match, chunks)
        end = self._add_chunks(machine, match, chunks) if state is not None else 0
        if not end:
            # Texts and classes in the memo were there before, so what is known of them stays true.
            del memo[height:]
            return False
        node.state = state
        machine.stack[-1] = node
        machine.pos = end
        return True

    def _tensor_state(
        self, machine: Machine, match: re.Match[bytes], chunks: list[Any]
    ) -> dict[str, Any] | None:
        key, cls, dtype, layout, memory, size_key, size, raw, chunks_key, _ = match.groups()
        properties = _memo(machine, cls)
        if (key, size_key, chunks_key) not in self._known[TENSOR]:
            if not self._knows(machine, (key, size_key, chunks_key), ("properties", "size", "chunks")):
                return None
            self._known[TENSOR].add((key, size_key, chunks_key))
        if dtype is not None and isinstance(properties, Global):
            properties = Node(properties, (), tuple(_memo(machine, get) for get in (dtype, layout, memory)))
            machine.memo += (properties, SKIPPED)
        shape = self._shape(machine, size, raw)
        if shape is None or not isinstance(properties, Node) or properties.target.path != PROPERTIES:
            return None
        if raw is not None:
            machine.memo += (shape, SKIPPED, shape)
        machine.memo.append(chunks)
        return {"properties": properties, "size": shape, "chunks": chunks}

    def _add_chunks(self, machine: Machine, match: re.Match[bytes], chunks: list[Any]) -> int:
        """Read the chunks behind a tensor's head; the byte behind the tensor, or 0."""
        data, pos = machine.data, match.end()
        while found := _NEXT_CHUNK.match(data, pos):
            chunk = self._add_chunk(machine, found, None)
            if chunk is None:
                return 0
            chunks.append(chunk)
            pos = found.end()
        marked = match[10] == b"("
        whole = data.startswith(b"eub" if marked else b"aub", pos) and (marked or len(chunks) == 1)
        return pos + 3 if whole else 0

    def _places(self, machine: Machine) -> bool:
        """Chunks' keys, each with the place of its record behind it."""
        stack = machine.stack
        cls: Global = stack[-1]
        match, begun = _PLACE.match(machine.data, machine.pos), False
        while match is not None:
            pair = self._add_place(machine, match, cls, begun)
            if pair is None:
                break
            if not begun:
                stack.pop()
            begun = True
            stack += pair
            machine.pos = match.end()
            match = _NEXT_PLACE.match(machine.data, machine.pos)
        return begun

    def _add_place(
        self, machine: Machine, match: re.Match[bytes], index_class: Global, again: bool
    ) -> tuple[Node, Node] | None:
        new, fqn_key, fqn, key, offset_key, size, raw, *rest = match.groups()
        cls, path_key, path, start_key, start, length_key, length = rest
        offset, name, file = (
            self._shape(machine, size, raw),
            self._text(machine, fqn),
            self._text(machine, path),
        )
        if offset is None or name is None or file is None:
            return None
        gets = (fqn_key, key, offset_key, cls, path_key, start_key, length_key, new)
        if gets not in self._known[INDEX]:
            count = 8 if again else 7
            if not self._knows(machine, gets[:count], _PLACE_KEYS[:count]):
                return None
            self._known[INDEX].add(gets)
        index = Node(index_class, (), (name, offset, None))
        stored = Node(_memo(machine, cls), (), (file, _integer(start), _integer(length), None))
        memo = machine.memo
        memo += (index, SKIPPED) if fqn[0] != 0x8C else (index, SKIPPED, name)
        if raw is not None:
            memo += (offset, SKIPPED, offset)
        memo += (stored, SKIPPED) if path[0] != 0x8C else (stored, SKIPPED, file)
        return index, stored

    @staticmethod
    def _knows(machine: Machine, gets: tuple[bytes, ...], expected: tuple[str, ...]) -> bool:
        """Whether the memo holds these texts, and globals of these paths, there.

        It only grows, so to have seen it once is enough.
        """
        for get, text in zip(gets, expected, strict=True):
            value = _memo(machine, get)
            if (value.path if isinstance(value, Global) else value) != text:
                return False
        return True

    def _shape(self, machine: Machine, get: bytes, raw: bytes | None) -> tuple[int, ...] | None:
        """A ``torch.Size`` made of ``raw`` by the global that ``get`` fetches, or fetched itself."""
        if raw is None:
            value = _memo(machine, get)
            return value if isinstance(value, tuple) else None
        if get not in self._sizes:
            if not self._knows(machine, (get,), ("torch.Size",)):
                return None
            self._sizes.add(get)
        return self._dimensions(raw)

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


def _integer(raw: bytes) -> int:
    """Value of an integer opcode with its operand."""
    code = raw[0]
    if code == 0x4B:
        return raw[1]
    if code == 0x8A:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little", signed=code == 0x4A)
