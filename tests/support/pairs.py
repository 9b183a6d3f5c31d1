"""Makes pairs of commands, A and B, that differ in one thing, and the checkpoints that they read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.support.kill_points import Commands
from tests.support.plain import Plain, edit_header, edit_json, plain, shards_of

Words = tuple[str | Path, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two commands (what stands around the destination), and what is to be changed while B runs.

    ``says``: a refusal of B holds one of these words. ``continues``: B is the same work and goes on.
    ``lasting``: what was changed for B cannot be undone, so A cannot be asked again.
    """

    a: Words
    b: Words
    says: Sequence[str] = ()
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    continues: bool = False
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where a pair's checkpoints are made, and who converts."""

    folder: Path
    commands: Commands

    def hf(self, name: str = "src", model: str = "qwen3-untied", seed: int = 0, shards: int = 2) -> Path:
        return made(model, seed, shards).write(self.folder / name)

    def unit(self, *options: str, root: str = "root", seed: int = 0, model: str = "qwen3-untied") -> Path:
        """A torch_dist made from a checkpoint of that seed; returns its root."""
        source = self.folder / f"origin-of-{root}-{len(list(self.folder.iterdir()))}"
        made(model, seed, 2).write(source)
        done = self.commands.run("convert", source, self.folder / root, "--to", "megatron", *options)
        assert done.code == 0, done.err
        return self.folder / root

    def variant(self, of: Path, change: Callable[[Path], None], name: str = "variant") -> Path:
        """A folder beside ``of`` that shares its files (hard links) but for what ``change`` does to it."""
        shutil.copytree(of, self.folder / name, copy_function=os.link)
        change(self.folder / name)
        return self.folder / name

    def swapped(self, place: Path, change: Callable[[Path], None], options: Words = (), *says: str) -> Pair:
        """A reads ``place``; while B runs, a variant of it stands there (what is alike is linked)."""
        other = self.variant(place, change, f"{place.name}-variant")
        words = (
            "--to",
            "hf" if (place / "latest_checkpointed_iteration.txt").exists() else "megatron",
            *options,
        )
        return Pair((place, *words), (place, *words), says, lambda: exchanged(place, other))


def made(model: str, seed: int, shards: int = 2) -> Plain:
    """A sound checkpoint, other weights for another seed."""
    result = plain(model)
    result.shards = shards
    for name in list(result.tensors) if seed else ():
        tensor = result.tensors[name]
        result.add(name, tensor.shape, tensor.dtype)
    return result


@contextmanager
def exchanged(place: Path, other: Path) -> Iterator[None]:
    """``other`` stands at ``place``; files keep their inodes and times."""
    away = place.with_name(f"{place.name}-away")
    place.rename(away)
    other.rename(place)
    try:
        yield
    finally:
        place.rename(other)
        away.rename(place)


def rewritten(path: Path, data: bytes, *, same_time: bool = False) -> None:
    """Put another file, with this content, where a shared one is."""
    before = path.stat()
    path.unlink()
    path.write_bytes(data)
    if same_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_bytes(path: Path) -> bytes:
    """A safetensors file with other numbers in every tensor: what was copied before a kill shows them too."""
    data = bytearray(path.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 32):
        data[at] ^= 1
    return bytes(data)


def shard(at: int, *, same_time: bool = False) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = shards_of(folder)[at]
        rewritten(path, other_bytes(path), same_time=same_time)

    return change


def all_shards(folder: Path) -> None:
    for at in range(len(shards_of(folder))):
        shard(at)(folder)


def touched(folder: Path) -> None:
    path = shards_of(folder)[0]
    rewritten(path, path.read_bytes())


def header(same_size: bool) -> Callable[[Path], None]:
    """Other metadata in a shard's header; at the same size also at the same time."""

    def change(folder: Path) -> None:
        path = shards_of(folder)[0]
        before = path.stat()
        rewritten(path, path.read_bytes())
        if same_size:
            content = path.read_bytes()
            path.write_bytes(content.replace(b'"format":"pt"', b'"format":"np"', 1))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            edit_header(path, lambda header: header["__metadata__"].update({"step": "2000"}))

    return change


def swapped_shards(folder: Path) -> None:
    """Each shard has the other's name, and the index says so."""
    first, second = shards_of(folder)
    for path, name in ((first, "a"), (second, "b")):
        path.rename(folder / name)
    (folder / "a").rename(second)
    (folder / "b").rename(first)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = {first.name: second.name, second.name: first.name}
    content["weight_map"] = {tensor: names[file] for tensor, file in content["weight_map"].items()}
    rewritten(index, json.dumps(content, indent=1).encode())


def replaced_by(other: Path) -> Callable[[Path], None]:
    """All weights files are those of another checkpoint."""

    def change(folder: Path) -> None:
        for path in (*shards_of(folder), *folder.glob("*.index.json")):
            path.unlink()
        for path in (*shards_of(other), *other.glob("*.index.json")):
            shutil.copy2(path, folder / path.name)

    return change


def json_field(name: str, field_name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        rewritten(path, path.read_bytes())
        edit_json(path, lambda content: content.__setitem__(field_name, value))

    return change


def content(name: str, data: bytes, *, same_time: bool = False) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if (folder / name).exists():
            rewritten(folder / name, data, same_time=same_time)
        else:
            (folder / name).write_bytes(data)

    return change
