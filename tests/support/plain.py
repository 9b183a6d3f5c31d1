"""Small checkpoints written by hand to be broken, and what a refusal must leave behind.

No torch and no transformers: names and shapes come from the tables, which other tests prove. All
bytes are random, so that no two tensors are equal unless a test makes them so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glmconv.basics.errors import GlmconvError
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Stop
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from glmconv.tables.expand import expand_tied, hf_layout
from glmconv.tables.registry import get_bridge

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))

from checkpoint_configs import raw_config  # noqa: E402

INDEX = "model.safetensors.index.json"
ITEM_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
NOBODY = 65534


@dataclass(slots=True)
class Tensor:
    """``data`` are the bytes of a dense tensor; ``dtype`` is the safetensors label."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class Plain:
    """An HF checkpoint in memory, in ``shards`` files; ``side`` are the files beside the weights."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    side: dict[str, bytes] = field(default_factory=lambda: {"tokenizer.json": b"{}\n", "LICENSE": b"free\n"})
    shards: int = 2
    random: np.random.Generator = field(default_factory=lambda: np.random.Generator(np.random.SFC64(7)))

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "BF16") -> None:
        """Add (or replace) a tensor of random finite numbers."""
        data = self.random.bytes(math.prod(shape) * ITEM_SIZES[dtype])
        if dtype in ("BF16", "F32", "F16", "F64"):
            # One exponent bit stays 0, so that no bf16 or fp32 is infinite or NaN.
            words = np.frombuffer(data + b"\0" * (-len(data) % 2), np.uint16) & np.uint16(0xBFBF)
            data = words.tobytes()[: len(data)]
        self.tensors[name] = Tensor(dtype, shape, data)

    def files(self) -> dict[str, dict[str, Tensor]]:
        """The tensors by the shard that holds them, in order."""
        names = list(self.tensors)
        if self.shards == 1:
            return {"model.safetensors": dict(self.tensors)}
        step = -(-len(names) // self.shards)
        return {
            f"model-{i + 1:05}-of-{self.shards:05}.safetensors": {
                name: self.tensors[name] for name in names[i * step : (i + 1) * step]
            }
            for i in range(self.shards)
        }

    def write(self, out: Path) -> Path:
        """Write the checkpoint into the new directory ``out`` and return it."""
        out.mkdir(parents=True)
        (out / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for name, data in self.side.items():
            (out / name).write_bytes(data)
        weight_map: dict[str, str] = {}
        for file, tensors in self.files().items():
            (out / file).write_bytes(safetensors(tensors))
            weight_map |= dict.fromkeys(tensors, file)
        if self.shards > 1:
            total = sum(len(tensor.data) for tensor in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (out / INDEX).write_text(json.dumps(index, indent=1))
        return out


def plain(model: str, *, stacked: bool = False, copies: bool = False, **changes: Any) -> Plain:
    """A sound checkpoint of a small ``model`` (see ``scripts/checkpoint_configs.py``).

    ``changes`` are fields of its config; ``stacked`` stores experts as transformers 5 does;
    ``copies`` adds the duplicates that the family's releases keep.
    """
    return plain_of(raw_config(model) | changes, stacked=stacked, copies=copies)


def plain_of(config: dict[str, Any], *, stacked: bool = False, copies: bool = False) -> Plain:
    """A sound checkpoint of the model that ``config`` describes."""
    bridge = get_bridge(config["model_type"])
    spec = bridge.spec(config, {})
    layout = hf_layout(bridge.table, spec, stacked_experts=stacked)
    made = Plain(config)
    for part in layout.parts:
        if part.stored not in made.tensors:
            locks = {tensor.lock for tensor, _ in part.slots} - {None}
            made.add(part.stored, (*layout.axes[part.stored], *part.shape), "F32" if locks else "BF16")
    if copies:
        for name, to in expand_tied(bridge.table, spec).items():
            made.tensors[name] = made.tensors[to]
    return made


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file, tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


def edit_header(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a safetensors header in place; the data stays where it follows the header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    replace_header(file, json.dumps(header).encode())


def replace_header(file: Path, text: bytes) -> None:
    """Put another text where a safetensors file has its header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def header_text(file: Path) -> str:
    """The JSON of a safetensors header."""
    content = file.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order."""
    return sorted(folder.glob("*.safetensors"))


def snapshot(root: Path) -> dict[str, tuple[int, int, str]]:
    """Every file and directory under ``root``: kind and permissions, time of change, digest of content."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        digest = _digest(path) if path.is_file() else ""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, digest)
    return found


def _digest(path: Path) -> str:
    """Of a file's content; holes of sparse files are told by their place alone."""
    hasher, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            os.lseek(file.fileno(), start, os.SEEK_SET)
            hasher.update(repr((start, at)).encode())
            hasher.update(file.read(at - start))
    hasher.update(repr(size).encode())
    return hasher.hexdigest()


def state(path: Path) -> dict[str, tuple[int, int, str]] | None:
    """:func:`snapshot` of a directory, None for anything else."""
    return snapshot(path) if os.path.isdir(path) else None


def content(path: Path) -> dict[str, tuple[int, str]]:
    """Every file and directory at a path that need not exist, without times."""
    return {name: (mode, digest) for name, (mode, _, digest) in (state(path) or {}).items()}


def refused(
    src: Path,
    dst: Path,
    kind: type[GlmconvError],
    *words: str,
    source: SourceOptions | None = None,
    target: TargetOptions | None = None,
    run: RunOptions | None = None,
    stop: Stop | None = None,
    litter: bool = False,
    meddled: bool = False,
) -> str:
    """Convert, and assert what every refusal must hold; returns the message.

    The error is exactly ``kind`` with its exit code, its message has all ``words``, the source is
    unchanged (unless a test ``meddled`` with it), nothing is at ``dst`` and (unless ``litter``)
    nothing beside it.
    """
    __tracebackhide__ = True
    before = state(src)
    beside = set(os.listdir(dst.parent)) if dst.parent.is_dir() else set()
    there = content(dst)
    with pytest.raises(GlmconvError) as caught:
        convert(src, dst, source=source, target=target, run=run, stop=stop)
    error, message = caught.value, str(caught.value)
    assert type(error) is kind, f"{type(error).__name__}: {message}"
    assert error.exit_code == kind.exit_code
    assert [word for word in words if word not in message] == [], message
    assert meddled or state(src) == before, "the source was touched"
    assert content(dst) == there, "something is at the destination, or was touched there"
    if not litter:
        after = set(os.listdir(dst.parent)) if dst.parent.is_dir() else set()
        assert after == beside, f"left behind: {after - beside}"
    return message


class Meddler(Stop):
    """A stop flag that is never set, and does something at the ``after``-th time it is asked.

    Workers ask before each step, so the deed happens in the middle of the work.
    """

    def __init__(self, deed: Callable[[], object], after: int = 1) -> None:
        super().__init__()
        self._deed, self._left = deed, after
        self._lock = threading.Lock()

    def is_set(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._deed()
        return False


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as nobody where the tests run as root, whom no permission stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
