"""Checkpoints broken on purpose, by safetensors and plain file writes; and the command line in-process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from glmconv import cli

INDEX = "model.safetensors.index.json"
Edit = Callable[[dict[str, Tensor]], None]


def copy(source: Path, target: Path) -> Path:
    """A checkpoint to break."""
    shutil.copytree(source, target)
    return target


def shard_of(path: Path, name: str) -> Path:
    """The file of an HF checkpoint that holds a tensor."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if name in set(opened.keys()):
                return file
    raise KeyError(name)


def edit(path: Path, name: str, change: Edit) -> None:
    """Change the tensors of the shard that holds ``name``; the index follows."""
    file = shard_of(path, name)
    tensors = load_file(file)
    before = set(tensors)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    index = path / INDEX
    if index.exists():
        content = json.loads(index.read_text())
        for gone in before - set(tensors):
            del content["weight_map"][gone]
        content["weight_map"] |= dict.fromkeys(set(tensors) - before, file.name)
        content["metadata"]["total_size"] = sum(
            tensor.nbytes for one in sorted(path.glob("*.safetensors")) for tensor in load_file(one).values()
        )
        index.write_text(json.dumps(content))


def put(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replace one tensor by ``change`` of it."""

    def one(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name].clone())

    edit(path, name, one)


def drop(path: Path, *names: str) -> None:
    """Take tensors out of their shards and the index."""
    for name in names:
        edit(path, name, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]


def tensor_of(path: Path, name: str) -> Tensor:
    """One tensor of an HF checkpoint."""
    return load_file(shard_of(path, name))[name]


def configure(path: Path, **fields: object) -> None:
    """Set fields of ``config.json``; None removes one."""
    file = path / "config.json"
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def flip(file: Path, offset: int) -> None:
    """Invert one byte."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 0xFF
    file.write_bytes(data)


@dataclass
class Ran:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """Run ``glmconv`` in this process."""
    monkeypatch.setattr(sys, "argv", ["glmconv", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    code = 0
    try:
        cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)
