"""The block ``model`` of a ``run_config.yaml`` of Megatron-Bridge.

Read line by line, in the form that ``yaml.safe_dump`` gives it (block style, two spaces): plain
scalars and lists of them, of ``model`` and of a ``transformer`` inside it. Anything else (nested
objects, anchors, tags, texts over several lines) is left out, so that it makes no claim. PyYAML would
be a dependency for these few lines, and would follow aliases and tags that nobody needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from glmconv.basics.errors import StorageError

FILE = "run_config.yaml"
MAX_BYTES = 4 << 20
_INNER = "transformer"
_WORDS: dict[str, Any] = {"null": None, "~": None, "": None, "true": True, "false": False}


def read_run_config(path: Path) -> dict[str, Any]:
    """Fields of the model that the file states. Empty where it has none; StorageError if unreadable."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                return {}
            lines = file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", where=str(path)) from error
    top = _block(lines, 0)
    model = _block(top.get("model", []), 2)
    inner = _block(model.get(_INNER, []), 4)
    return _plain(inner) | _plain(model)


def _block(lines: list[str], indent: int) -> dict[str, list[str]]:
    """Keys at one depth, each with its own line's rest and the lines below it."""
    found: dict[str, list[str]] = {}
    below: list[str] = []
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        key, colon, rest = line[depth:].partition(":")
        if depth == indent and colon and key.isidentifier() and (not rest or rest[0] == " "):
            below = found[key] = [rest.strip()] if rest.strip() else []
        elif line.strip() and not line.lstrip().startswith("#"):
            below.append(line)
    return found


def _plain(block: dict[str, list[str]]) -> dict[str, Any]:
    """Values that are scalars or lists of scalars."""
    values: dict[str, Any] = {}
    for key, lines in block.items():
        items = [line.strip() for line in lines]
        if len(items) == 1 and not items[0].startswith("- "):
            values |= _pair(key, items[0])
        elif not items:
            values[key] = None
        elif all(item.startswith("- ") for item in items):
            inside = [_pair(key, item[2:].strip()) for item in items]
            if all(inside):
                values[key] = [one[key] for one in inside]
    return values


def _pair(key: str, text: str) -> dict[str, Any]:
    """The scalar under its key, or nothing where it is none that can be told for certain."""
    if text in _WORDS:
        return {key: _WORDS[text]}
    if text[0] in "+-.0123456789" and "_" not in text:
        for kind in (int, float):
            try:
                return {key: kind(text)}
            except ValueError:
                continue
    word = text.replace("_", "").replace(".", "")
    return {key: text} if word.isalnum() and word.isascii() else {}
