"""What each pickle opcode does to a :class:`~glmconv.formats.torchdist.pickle.machine.Machine`.

The opcodes are those that the picklers of Python 3 emit for protocols 2 to 5, but for the
extension registry and out-of-band buffers; every other byte is refused. The names in capitals
are those of ``pickletools``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

from glmconv.formats.torchdist.pickle import objects
from glmconv.formats.torchdist.pickle.machine import (
    SKIPPED,
    Machine,
    NeedsAll,
    Node,
    Persistent,
    Refused,
    Stop,
)

Handler = Callable[[Machine], Any]


def _refuse(machine: Machine) -> NoReturn:
    opcode = machine.data[machine.pos - 1]
    raise Refused(f"it holds opcode 0x{opcode:02x}, which no pickler of checkpoints emits")


TABLE: list[Handler] = [_refuse] * 256
"""Handler of each opcode."""


def _opcode(code: int | str) -> Callable[[Handler], Handler]:
    """Enter a handler into the table."""

    def enter(handler: Handler) -> Handler:
        TABLE[ord(code) if isinstance(code, str) else code] = handler
        return handler

    return enter


def _constants() -> None:
    def push(value: Any) -> Handler:
        return lambda machine: machine.stack.append(value)

    for code, value in (("N", None), (0x88, True), (0x89, False), (")", ())):
        _opcode(code)(push(value))


def _sized() -> None:
    """Texts, bytes and memo references: an operand of some width before what it counts or names."""

    def text(width: int) -> Handler:
        return lambda machine: _push_text(machine, machine.take(machine.count(width)).decode())

    def raw(width: int) -> Handler:
        return lambda machine: machine.stack.append(machine.take(machine.count(width)))

    def put(width: int) -> Handler:
        return lambda machine: _put(machine, machine.count(width))

    for code, width in ((0x8C, 1), ("X", 4), (0x8D, 8)):
        _opcode(code)(text(width))
    for code, width in (("C", 1), ("B", 4), (0x8E, 8), (0x96, 8)):
        _opcode(code)(raw(width))
    for code, width in (("q", 1), ("r", 4)):
        _opcode(code)(put(width))


def _push_text(machine: Machine, text: str) -> None:
    machine.stack.append(text)
    # The outermost object's keys lie one group deep: object, state, mark, key, value, key …
    if text in machine.policy.stop_at and len(machine.marks) == 1:
        machine.stack.pop()
        objects.set_items(machine)
        objects.build(machine)
        raise Stop


def _put(machine: Machine, index: int) -> None:
    if index != len(machine.memo):
        raise Refused(f"it stores memo {index} where {len(machine.memo)} is next")
    machine.memo.append(machine.stack[-1])


_constants()
_sized()


@_opcode(0x80)  # PROTO
def _proto(machine: Machine) -> None:
    if machine.pos != 1:
        raise Refused("it begins twice")
    machine.pos += 1


@_opcode(0x95)  # FRAME: a hint for readers of streams
def _frame(machine: Machine) -> None:
    machine.take(8)


@_opcode(".")
def _stop(machine: Machine) -> None:
    if machine.pos != len(machine.data):
        raise Refused("something follows its end")
    raise Stop


@_opcode("]")
def _empty_list(machine: Machine) -> None:
    machine.stack.append([])


@_opcode("}")
def _empty_dict(machine: Machine) -> None:
    machine.stack.append({})


@_opcode(0x8F)
def _empty_set(machine: Machine) -> None:
    machine.stack.append(Node(machine.find_global("builtins", "set"), ()))


@_opcode("K")  # BININT1
def _int1(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.pos])
    machine.pos += 1


@_opcode("M")  # BININT2
def _int2(machine: Machine) -> None:
    machine.stack.append(machine.count(2))


@_opcode("J")  # BININT
def _int4(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(4), "little", signed=True))


@_opcode(0x8A)
def _long1(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.count(1)), "little", signed=True))


@_opcode("G")  # BINFLOAT
def _float(machine: Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


@_opcode("(")
def _mark(machine: Machine) -> None:
    machine.marks.append(len(machine.stack))


@_opcode("0")
def _pop(machine: Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


@_opcode("1")
def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


@_opcode("2")
def _dup(machine: Machine) -> None:
    machine.stack.append(machine.stack[-1])


@_opcode(0x94)
def _memoize(machine: Machine) -> None:
    machine.memo.append(machine.stack[-1])


@_opcode("h")  # BINGET
def _get1(machine: Machine) -> None:
    value = machine.memo[machine.data[machine.pos]]
    machine.pos += 1
    if value is SKIPPED:
        raise NeedsAll
    machine.stack.append(value)


@_opcode("j")  # LONG_BINGET
def _get4(machine: Machine) -> None:
    value = machine.memo[machine.count(4)]
    if value is SKIPPED:
        raise NeedsAll
    machine.stack.append(value)


@_opcode(0x85)
def _tuple1(machine: Machine) -> None:
    stack = machine.stack
    stack[-1] = (stack[-1],)


@_opcode(0x86)
def _tuple2(machine: Machine) -> None:
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)


@_opcode(0x87)
def _tuple3(machine: Machine) -> None:
    stack = machine.stack
    last, middle = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], middle, last)


@_opcode("t")
def _tuple(machine: Machine) -> None:
    machine.stack.append(tuple(machine.pop_mark()))


@_opcode("l")
def _list(machine: Machine) -> None:
    machine.stack.append(machine.pop_mark())


for _code, _handler in {
    0x91: objects.frozen_set,
    ord("a"): objects.append,
    ord("e"): objects.appends,
    0x90: objects.appends,  # ADDITEMS
    ord("s"): objects.set_item,
    ord("u"): objects.set_items,
    ord("c"): objects.global_,
    0x93: objects.stack_global,
    0x81: objects.new_object,
    0x92: objects.new_object_ex,
    ord("R"): objects.reduce,
    ord("b"): objects.build,
}.items():
    TABLE[_code] = _handler


@_opcode("Q")
def _persistent(machine: Machine) -> None:
    if not machine.policy.persistent:
        raise Refused("it refers to a storage outside of it")
    machine.stack.append(Persistent(machine.stack.pop()))
