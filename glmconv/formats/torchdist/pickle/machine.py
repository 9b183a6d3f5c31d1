"""The state of the pickle interpreter (see ``pickles``) and the values that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_OPCODES = 100_000_000
"""Opcodes that one pickle may hold: some 1.5 million chunks of a checkpoint's metadata."""

STOP = ord(".")


class Global:
    """A class or function that a pickle names; ``path`` is ``module.name``. It is never imported."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return self.path


class Node:
    """An object that a pickle describes: ``target(*args)`` with ``state``, never made.

    ``extra`` holds what was appended to it, or set in it as (key, value) pairs.
    """

    __slots__ = ("args", "extra", "state", "target")

    def __init__(self, target: Global, args: Any, state: Any = None) -> None:
        self.target = target
        self.args = args
        self.state = state
        self.extra: list[Any] | None = None

    def add(self, values: Sequence[Any]) -> None:
        """What the pickle appends to the object or sets in it."""
        if self.extra is None:
            self.extra = []
        self.extra.extend(values)


@dataclass(frozen=True, slots=True)
class Persistent:
    """What torch pickles in the place of a storage: ``key`` tells which."""

    key: Any


class Skipped:
    """In the memo: a value that a shortcut did not make. Fetching it means to read without shortcuts."""


SKIPPED = Skipped()

Shortcut = Callable[["Machine"], bool]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a pickle may hold.

    Globals are given by their paths. ``allowed``: those that it may name; None allows any (they
    stay names). ``persistent``: whether it may refer to storages beside it.
    ``shortcuts``: for a global, a function tried where an object of it begins, the global on top of
    the stack; it may read on in one step and say True, or leave the machine as it was and say False.
    ``fields``: for a global, the attributes that an object of it has; its state then becomes a
    tuple in this order, None where one is absent.
    ``stop_at``: keys of the outermost object from which on nothing need be read.
    """

    allowed: frozenset[str] | None = None
    persistent: bool = False
    shortcuts: Mapping[str, Shortcut] = field(default_factory=dict)
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stop_at: frozenset[str] = frozenset()


class Refused(Exception):
    """A fault in the pickle; becomes a DataError that adds the place."""


class NeedsAll(Exception):
    """The pickle fetches a value that a shortcut skipped."""


class Stop(Exception):
    """The pickle's end, or a key of ``Policy.stop_at``."""


class Machine:
    """The interpreter's state. ``pos`` is the next byte; ``marks`` are heights of the stack.

    The memo only grows: entry *i* never changes once made.
    """

    __slots__ = ("data", "globals", "marks", "memo", "policy", "pos", "stack")

    def __init__(self, data: bytes, policy: Policy) -> None:
        self.data = data
        self.policy = policy
        self.pos = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.globals: dict[str, Global] = {}

    def run(self, table: Sequence[Callable[[Machine], Any]]) -> Any:
        """Interpret up to the STOP opcode, which must be the last byte."""
        data = self.data
        if data[:1] != b"\x80" or not 2 <= data[1] <= 5:
            raise Refused("it does not begin as a pickle of protocol 2 to 5")
        try:
            for _ in range(MAX_OPCODES):
                opcode = data[self.pos]
                self.pos += 1
                table[opcode](self)
        except Stop:
            pass
        else:
            raise Refused(f"it has more than {MAX_OPCODES} opcodes")
        if data[-1] != STOP:
            raise Refused("it does not end as a pickle ends")
        if self.marks or len(self.stack) != 1:
            raise Refused("it does not leave exactly one value")
        return self.stack[0]

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self.pos + size
        if end > len(self.data):
            raise Refused(f"it ends {end - len(self.data)} bytes early")
        taken = self.data[self.pos : end]
        self.pos = end
        return taken

    def count(self, size: int) -> int:
        """An unsigned little-endian number of ``size`` bytes."""
        return int.from_bytes(self.take(size), "little")

    def pop_mark(self) -> list[Any]:
        """Values above the last mark, taken off the stack with it."""
        if not self.marks:
            raise Refused("it closes a group that it never opened")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def find_global(self, module: Any, name: Any) -> Global:
        """The global of that name, if the policy allows it."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("it names a class by something that is not text")
        path = f"{module}.{name}"
        named = self.globals.get(path)
        if named is None:
            if self.policy.allowed is not None and path not in self.policy.allowed:
                raise Refused(f"it names {path!r}, which does not belong in such a file")
            named = self.globals[path] = Global(path)
        return named
