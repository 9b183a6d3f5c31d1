"""Files of a checkpoint beside its weights: which are copied, and which a new unit may replace."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from glmconv.basics.errors import DataError, StorageError
from glmconv.basics.json_files import MAX_CONFIG, MAX_INDEX, read_json
from glmconv.formats.safetensors.checkpoint import INDEX
from glmconv.formats.safetensors.origin import FILE as ORIGIN
from glmconv.plan.side_names import (
    MODULE,
    SHARD,
    UNIT_FILES,
    WEIGHTS,
    classify,
    is_own,
    matches,
)
from glmconv.source.manifest import FILE as MANIFEST
from glmconv.source.manifest import HF_DIR, read_manifest

MAX_ENTRIES = 100_000
"""Entries of directories that a search looks at; the largest releases have some hundred."""

MAX_FOREIGN = 1_000
"""Files that are listed at most as not a checkpoint's own."""

MAX_SHOWN = 24

FOLDERS = (HF_DIR, "tokenizer")
"""Directories of a torch_dist unit that hold HF config and side files (ours, Megatron-Bridge's)."""

MARKS = frozenset(
    (".git", ".hg", ".svn", ".metadata", "latest_checkpointed_iteration.txt", "latest_train_state.pt")
)
"""A sub-directory that holds one of them, or weights, is no plain one."""

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".distcp")


@dataclass(slots=True)
class SideFiles:
    """``files`` are copied, ``left`` is told; paths are relative to the directory, sorted."""

    files: list[Path] = field(default_factory=list)
    left: list[Path] = field(default_factory=list)


def find_side_files(root: Path) -> SideFiles:
    """Side files of the checkpoint in ``root``, and what stays behind and is neither weights nor trainer's.

    Only regular files of the directory and of plain sub-directories (none that is a checkpoint or a
    repository of its own). Raises DataError for a link that leaves the checkpoint (those of a hub
    cache may lead to its blobs), for one that leads to nothing, and for a directory without end;
    StorageError for what cannot be read.
    """
    found, waiting, seen = SideFiles(), [Path()], 0
    real = Path(os.path.realpath(root))
    while waiting:
        folder = waiting.pop()
        entries = _entries(root / folder)
        seen += len(entries)
        if seen > MAX_ENTRIES:
            raise DataError(
                f"holds more than {MAX_ENTRIES:,} files",
                where=str(root),
                hint="name a directory that holds the model's own files only",
            )
        if folder.parts and _is_apart(folder, entries):
            found.left.append(folder / entries[0].name)
            continue
        for entry in entries:
            path = folder / entry.name
            kind = classify(path)
            if entry.is_dir(follow_symlinks=False):
                waiting += [path] if classify(path / "file") != "trainer" else []
            elif kind == "side" and _is_own_file(root / path, entry, real):
                found.files.append(path)
            elif kind in ("side", "other"):
                found.left.append(path)
    found.files.sort()
    found.left.sort()
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, MAX_ENTRIES + 1), key=lambda entry: entry.name)
    except OSError as error:
        raise StorageError(f"cannot look into it: {error.strerror}", where=str(folder)) from error


def _is_apart(folder: Path, entries: list[os.DirEntry[str]]) -> bool:
    """Whether a sub-directory is a checkpoint or a repository of its own."""
    if MODULE.fullmatch(folder.name):
        return False
    return any(
        entry.name in MARKS or matches(entry.name, WEIGHTS) or entry.name.endswith(OTHER_WEIGHTS)
        for entry in entries
    )


def _is_own_file(path: Path, entry: os.DirEntry[str], root: Path) -> bool:
    """Whether it is a regular file that belongs to the checkpoint. Raises DataError for links."""
    if not entry.is_symlink():
        return entry.is_file(follow_symlinks=False)
    target = Path(os.path.realpath(path))
    if not (target.is_relative_to(root) or _is_blob(target, root)):
        raise DataError(
            f"is a link that leaves the checkpoint, to {target}",
            where=str(path),
            hint="put the file itself there, if it belongs to the model; or remove the link",
        )
    if not target.exists():
        raise DataError(f"is a link to {target}, where nothing is", where=str(path), hint="fetch it again")
    return target.is_file()


def _is_blob(target: Path, root: Path) -> bool:
    """Whether a file is a blob of a hub cache: ``models--OWNER--NAME/blobs/<etag>``.

    A snapshot's blobs are those of its own repository; a directory that ``huggingface_hub`` before
    0.23 filled by ``local_dir`` links to those of any.
    """
    repository = target.parent.parent
    if target.parent.name != "blobs" or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", target.name):
        return False
    if root.parent.name == "snapshots":
        return repository == root.parent.parent
    return repository.name.startswith("models--")


def grouped(paths: Iterable[Path]) -> str:
    """Names in few words: a sub-directory is one, so are files whose names differ in numbers only."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        pattern = f"{path.parts[0]}/" if len(path.parts) > 1 else re.sub(r"\d+", "*", path.name)
        groups.setdefault(pattern, []).append(path.name)
    told = [
        pattern
        if pattern.endswith("/")
        else names[0]
        if len(names) == 1
        else f"{pattern} ({len(names)} files)"
        for pattern, names in groups.items()
    ]
    rest = f" and {len(told) - MAX_SHOWN} more" if len(told) > MAX_SHOWN else ""
    return ", ".join(told[:MAX_SHOWN]) + rest


def is_checkpoint(unit: Path) -> bool:
    """Whether a directory holds weights under a checkpoint's names, or a manifest. Raises StorageError."""
    names = {entry.name for entry in _entries(unit)}
    weights = ".metadata" in names or any(SHARD.fullmatch(name) or name.endswith(".distcp") for name in names)
    return weights or (MANIFEST in names and read_manifest(unit / MANIFEST) is not None)


def foreign_in_unit(unit: Path, most: int = MAX_FOREIGN) -> list[Path]:
    """What lies in a directory and is not a checkpoint's own: at most ``most`` paths, relative to it.

    Nothing of it may be removed with the checkpoint. A checkpoint's own are the files that its manifest
    lists with their size or its index names, and those that are called as every release calls them
    (``model-00001-of-00002.safetensors``, ``tokenizer.json``); a module only where a config's
    ``auto_map`` names it. Links, special files, hidden directories, mounts and empty directories are
    foreign, so is everything in a directory that holds neither weights nor a manifest. Raises
    StorageError for what cannot be looked into.
    """
    owns = _owner(unit) if is_checkpoint(unit) else lambda path, size: False
    return sorted(islice(_foreign(unit, owns), most))


def _foreign(unit: Path, owns: Callable[[Path, int], bool]) -> Iterator[Path]:
    waiting = [Path()]
    while waiting:
        folder = waiting.pop()
        empty = True
        try:
            with os.scandir(unit / folder) as entries:
                for entry in entries:
                    empty = False
                    path = folder / entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name.startswith(".") or os.path.ismount(unit / path):
                            yield path
                        else:
                            waiting.append(path)
                    elif not entry.is_file(follow_symlinks=False) or not owns(path, entry.stat().st_size):
                        yield path
        except OSError as error:
            raise StorageError(f"cannot look into it: {error.strerror}", where=str(unit / folder)) from error
        if empty and folder.parts:
            yield folder


def _owner(unit: Path) -> Callable[[Path, int], bool]:
    """Tells of a path in a checkpoint, and the file's size, whether it is the checkpoint's own."""
    names = {entry.name for entry in _entries(unit)}
    megatron = any(name in (".metadata", "common.pt") or name.endswith(".distcp") for name in names)
    written = _written(unit)
    sharded = _index(unit)

    def owns(path: Path, size: int) -> bool:
        if written.get(path.as_posix()) == size or path.as_posix() == MANIFEST:
            return True
        if not megatron:
            shard = len(path.parts) == 1 and SHARD.fullmatch(path.name) is not None
            return shard or path.as_posix() in sharded or _is_own(path, code[""])
        if len(path.parts) == 1:
            return matches(path.name, UNIT_FILES)
        if path.parts[0] in FOLDERS:
            inner = PurePath(*path.parts[1:])
            return path.parts[1:] == (ORIGIN,) or _is_own(inner, code[path.parts[0]])
        return matches(path.parts[0], ("modelopt_*",))

    code = {folder: _code(unit / folder) for folder in ("", *FOLDERS)}
    return owns


def _is_own(path: PurePath, code: set[str]) -> bool:
    return is_own(path) or path.as_posix() in code


def _json(path: Path, most: int) -> dict[str, Any]:
    """A JSON object, empty where there is none that can be read."""
    try:
        return read_json(path, most)
    except (DataError, StorageError):
        return {}


def _written(unit: Path) -> dict[str, int]:
    """Files that the manifest lists, with their sizes."""
    files = (read_manifest(unit / MANIFEST) or {}).get("files")
    listed = [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return {
        one["path"]: one["size"]
        for one in listed
        if isinstance(one.get("path"), str) and type(one.get("size")) is int
    }


def _index(unit: Path) -> set[str]:
    """Safetensors files that the index names."""
    weight_map = _json(unit / INDEX, MAX_INDEX).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    return {file for file in files if isinstance(file, str) and file.endswith(".safetensors")}


def _code(folder: Path) -> set[str]:
    """Modules that a config's ``auto_map`` names: ``{"AutoModel": "my_model.MyModel"}``."""
    found: set[str] = set()
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        auto_map = _json(folder / name, MAX_CONFIG).get("auto_map") if (folder / name).is_file() else None
        named = list(auto_map.values()) if isinstance(auto_map, dict) else []
        named += [inner for one in named if isinstance(one, list) for inner in one]
        for reference in named:
            if isinstance(reference, str) and "." in reference:
                module = reference.rpartition("--")[2].rpartition(".")[0]
                found.add(f"{module.replace('.', '/')}.py")
    return found
