"""Opcodes that fill containers, name classes and describe objects (see ``opcodes``)."""

from __future__ import annotations

from typing import Any

from glmconv.formats.torchdist.pickle.machine import Global, Machine, Node, Refused

_MAX_NAME = 1024
_ATOMS = (str, int, float, bytes, Global, type(None))


def append(machine: Machine) -> None:
    """APPEND."""
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def appends(machine: Machine) -> None:
    """APPENDS, ADDITEMS."""
    values = machine.pop_mark()
    _extend(machine.stack[-1], values)


def frozen_set(machine: Machine) -> None:
    """FROZENSET."""
    node = Node(machine.find_global("builtins", "frozenset"), ())
    node.add(machine.pop_mark())
    machine.stack.append(node)


def set_item(machine: Machine) -> None:
    """SETITEM."""
    value, key = machine.stack.pop(), machine.stack.pop()
    _fill(machine.stack[-1], [key, value])


def set_items(machine: Machine) -> None:
    """SETITEMS."""
    values = machine.pop_mark()
    _fill(machine.stack[-1], values)


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Node):
        target.add(values)
    else:
        raise Refused("it appends to something that is not a list")


def _fill(target: Any, values: list[Any]) -> None:
    if len(values) % 2:
        raise Refused("it sets a key without a value")
    pairs = list(zip(values[::2], values[1::2], strict=True))
    if isinstance(target, Node):
        target.add(pairs)
        return
    if not isinstance(target, dict):
        raise Refused("it sets a key of something that is not a dictionary")
    for key, _ in pairs:
        if not isinstance(key, str):
            _check_key(key)
    target.update(pairs)


def _check_key(key: Any) -> None:
    """Refuse keys that cannot be hashed, or only slowly: a tuple may hold nothing but atoms."""
    if isinstance(key, tuple):
        if all(isinstance(item, _ATOMS) for item in key):
            return
    elif isinstance(key, (Node, *_ATOMS)):  # a Node counts by its identity
        return
    raise Refused(f"it has a key that is a {type(key).__name__}")


def global_(machine: Machine) -> None:
    """GLOBAL: two lines of text."""
    names = []
    for _ in range(2):
        end = machine.data.find(b"\n", machine.pos, machine.pos + _MAX_NAME)
        if end < 0:
            raise Refused("it names a class without an end")
        names.append(machine.take(end - machine.pos).decode())
        machine.pos += 1
    machine.stack.append(machine.find_global(*names))


def stack_global(machine: Machine) -> None:
    """STACK_GLOBAL."""
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.find_global(module, name))


def new_object(machine: Machine) -> None:
    """NEWOBJ: describe an object of a class."""
    stack = machine.stack
    args, target = stack.pop(), stack[-1]
    if not isinstance(target, Global) or not isinstance(args, tuple):
        raise Refused("it makes an object of something that is not a class")
    shortcut = machine.policy.shortcuts.get(target.path)
    if shortcut is None or args or not shortcut(machine):
        stack[-1] = Node(target, args)


def new_object_ex(machine: Machine) -> None:
    """NEWOBJ_EX: the same with keywords."""
    keywords, args, target = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if not isinstance(target, Global):
        raise Refused("it makes an object of something that is not a class")
    machine.stack.append(Node(target, (args, keywords)))


def reduce(machine: Machine) -> None:
    """REDUCE: describe the call; only the few calls that stand for plain values give those."""
    args, target = machine.stack.pop(), machine.stack.pop()
    if not isinstance(args, tuple) or not isinstance(target, Global):
        raise Refused("it calls something that is not a class or function")
    made: Any = Node(target, args)
    if target.path == "torch.Size" and len(args) == 1 and isinstance(args[0], tuple):
        made = args[0]
    elif target.path == "collections.OrderedDict" and not args:
        made = {}
    elif target.path == "__builtin__.bytes" and not args:
        made = b""
    elif target.path == "_codecs.encode" and len(args) == 2 and args[1] == "latin1":
        if not isinstance(args[0], str):
            raise Refused("it encodes something that is not text")
        made = args[0].encode("latin1")
    machine.stack.append(made)


def build(machine: Machine) -> None:
    """BUILD: the state of an object."""
    state = machine.stack.pop()
    node = machine.stack[-1]
    if isinstance(node, dict):  # attributes of an OrderedDict, which nothing here needs
        return
    if not isinstance(node, Node) or node.state is not None:
        raise Refused("it sets the state of something that is not a new object")
    fields = machine.policy.fields.get(node.target.path)
    if fields is not None:
        if not isinstance(state, dict) or not state.keys() <= set(fields):
            raise Refused(f"it holds a {node.target.path} with other attributes than {', '.join(fields)}")
        state = tuple([state.get(name) for name in fields])
    node.state = state
