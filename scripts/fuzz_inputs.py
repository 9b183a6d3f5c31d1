"""Mutations for ``fuzz.py``: bytes, JSON trees, pickle opcodes, torch archives, odd side files."""

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

Mutator = Callable[[random.Random, bytes], bytes]

INTERESTING_BYTES = (0x00, 0x01, 0x20, 0x22, 0x2E, 0x7F, 0x80, 0x8A, 0xFF)
INTERESTING_SIZES = (0, 1, 7, 8, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def odd_values() -> list[Any]:
    """JSON values that a reader may not expect where it finds them."""
    numbers: list[Any] = [0, -1, 1, 2, 3, 64, 1 << 16, 1 << 31, (1 << 40) - 1, 1 << 62, 1 << 63, 10**400]
    numbers += [0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")]
    texts: list[Any] = ["", "x", "null", "full", "F32", "BF16", "F8_E4M3", "U8", "..", "../x", "/etc/passwd"]
    texts += [
        "\ud800",
        "\udce9",
        "\0",
        "a" * 300,
        "config.json",
        "sub/x",
        "model.safetensors",
        "[bold]",
        "dense",
    ]
    others: list[Any] = [
        None,
        True,
        False,
        [],
        {},
        [[]],
        [0] * 100,
        [{}],
        {"": ""},
        {"dtype": []},
        _deep(60),
        _deep(500),
    ]
    return numbers + texts + others


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def edit_bytes(rng: random.Random, data: bytes) -> bytes:
    """Cut, double, insert, overwrite or truncate."""
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 2, 4, 8, 64, 1000))
    piece = bytes(rng.choice(INTERESTING_BYTES) for _ in range(length))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + length :]
    if kind == 2:
        return data[:at] + data[at : at + length] + data[at:]
    if kind == 3:
        return data[:at] + piece + data[at:]
    if kind == 4:
        return data[:at] + piece + data[at + length :]
    return data[:at] + rng.choice(INTERESTING_SIZES).to_bytes(8, "little") + data[at + 8 :]


def any_bytes(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((flip_bits, edit_bytes))(rng, data)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of every node below ``value``."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        found.append((value, key))
        _places(inner, found)
    return found


def edit_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove, add, copy or exchange nodes of a JSON tree; the tree is changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(tree, [])
        if not places:
            return rng.choice(odd_values())
        holder, key = rng.choice(places)
        other, other_key = rng.choice(places)
        kind = rng.randrange(7)
        if kind <= 2:
            holder[key] = rng.choice(odd_values())
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif kind == 5:
            holder[key], other[other_key] = _apart(other[other_key]), _apart(holder[key])
        elif isinstance(holder, dict):
            holder[str(rng.choice(odd_values()))] = holder.pop(key)
        else:
            holder.insert(key, rng.choice(odd_values()))
    if isinstance(tree, dict) and rng.random() < 0.01:
        return rng.choice(odd_values())
    return tree


def _apart(value: Any) -> Any:
    """A copy that shares nothing, so that no tree comes to hold itself."""
    return json.loads(json.dumps(value))


def nudge_numbers(rng: random.Random, tree: Any) -> Any:
    """Change one number a little: sizes that nearly fit are the hard cases."""
    places = [(holder, key) for holder, key in _places(tree, []) if type(holder[key]) in (int, bool)]
    if places:
        holder, key = rng.choice(places)
        value = holder[key]
        holder[key] = rng.choice((value + 1, value - 1, value * 2, value // 2, -value, value + (1 << 12)))
    return tree


def json_text(rng: random.Random, data: bytes) -> bytes:
    """A JSON document with its tree changed, or with a key twice, or with its bytes changed."""
    kind = rng.random()
    if kind < 0.15:
        return any_bytes(rng, data)
    tree = json.loads(data)
    if kind < 0.25 and isinstance(tree, dict) and tree:
        key = rng.choice(list(tree))
        twice = f"{{{json.dumps(key)}: {json.dumps(rng.choice((tree[key], rng.choice(odd_values()))))},"
        return twice.encode() + json.dumps(tree).lstrip("{").encode()
    change = nudge_numbers if kind < 0.5 else edit_tree
    try:
        return json.dumps(change(rng, tree)).encode()
    except RecursionError:  # deep values that met: Python can read such a text, but not write it
        return b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}"


def safetensors_file(rng: random.Random, data: bytes) -> bytes:
    """A shard with another header, another length, or cut."""
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.6:
        text = json_text(rng, text)
    elif kind < 0.8:
        text = any_bytes(rng, text)
    elif kind < 0.9:
        return any_bytes(rng, data[: 8 + length]) + rest
    else:
        return edit_bytes(rng, data)
    return len(text).to_bytes(8, "little") + text + rest


def pickle_bytes(rng: random.Random, data: bytes) -> bytes:
    """A pickle with opcodes removed, doubled, exchanged or replaced, or with its bytes changed."""
    if rng.random() < 0.3:
        return any_bytes(rng, data)
    starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    pieces = [data[a:b] for a, b in pairwise(starts)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        kind = rng.randrange(6)
        if kind == 0 and len(pieces) > 1:
            del pieces[at]
        elif kind == 1:
            pieces.insert(at, pieces[at])
        elif kind == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif kind == 3:
            pieces[at] = pieces[other]
        elif kind == 4:
            pieces[at] = rng.choice(ODD_OPCODES)
        else:
            pieces.insert(at, rng.choice(ODD_OPCODES))
    return b"".join(pieces)


ODD_OPCODES = (
    *(
        b"N",
        b"\x88",
        b")",
        b"]",
        b"}",
        b"(",
        b"0",
        b"1",
        b"2",
        b"\x85",
        b"\x86",
        b"t",
        b"l",
        b"d",
        b"e",
        b"u",
        b"s",
    ),
    *(b"K\x00", b"K\xff", b"J\xff\xff\xff\xff", b"G\x7f\xf0" + bytes(6), b"\x8a\x09" + b"\xff" * 8 + b"\x7f"),
    *(
        b"\x8c\x05../xx",
        b"\x8c\x00",
        b"\x8c\x04/etc",
        b"X\x01\x00\x00\x00\xff",
        b"C\x01a",
        b"q\x00",
        b"h\x00",
    ),
    *(
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"\x93",
        b"R",
        b"b",
        b"\x81",
        b"\x92",
        b"Q",
        b"\x94",
        b".",
        b"a",
    ),
    *(b"cargparse\nNamespace\n", b"\x8f", b"\x91", b"\x90", b"j\xff\xff\xff\xff", b"\x95" + b"\xff" * 8),
)
"""Opcodes that change what is on the stack, some with hostile operands."""


def torch_archive(rng: random.Random, data: bytes) -> bytes:
    """A ``torch.save`` file with another pickle inside, or with its bytes changed."""
    if rng.random() < 0.5:
        return any_bytes(rng, data)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            member = old.open(name)
            member._expected_crc = None  # type: ignore[attr-defined]  # torch may leave checksums 0
            content = member.read()
            new.writestr(name, pickle_bytes(rng, content) if name.endswith("data.pkl") else content)
    return made.getvalue()


def record_heads(rng: random.Random, data: bytes) -> bytes:
    """A ``.distcp`` file with bytes changed in the head or the tail of some record, or cut."""
    if rng.random() < 0.2:
        return edit_bytes(rng, data)
    marks = [at for at in range(0, len(data) - 4) if data[at : at + 2] == b"PK"]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice(marks) + rng.randrange(64)
        if at < len(changed):
            changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1 << rng.randrange(8)))
    return bytes(changed)


ODD_NAMES = (
    *(
        b"caf\xe9.txt",
        b"new\nline",
        b"tab\tname",
        b" ",
        b"-rf",
        b"*",
        b"$(id)",
        b"\xff\xfe",
        "模型.txt".encode(),
    ),
    *(b"a" * 250, b"glmconv.json", b"glmconv-origin.json", b"x.safetensors", b"x.bin", b".hidden", b"[red]x"),
    *(
        b"config.json.bak",
        b"model.safetensors.index.json.bak",
        b"__0_0.distcp",
        b"release",
        b"hf",
        b"common.pt",
    ),
)


def odd_side_file(rng: random.Random, folder: Path) -> Path:
    """Put a file (directory, link, pipe) of an odd name into a checkpoint."""
    paths = [Path(os.fsdecode(os.fsencode(folder) + b"/" + name)) for name in ODD_NAMES]
    path = rng.choice([path for path in paths if not os.path.lexists(path)])
    kind = rng.randrange(6)
    if kind == 0:
        path.mkdir()
        (path / "inner.txt").write_text("inner")
    elif kind == 1:
        path.symlink_to(rng.choice(("/nonexistent", ".", "/dev/null", "config.json", path.name)))
    elif kind == 2:
        os.mkfifo(path)
    else:
        path.write_bytes(rng.choice((b"", b"x", b"{}", b"\0" * 5000)))
    return path
