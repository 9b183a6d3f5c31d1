"""Open a Hugging Face checkpoint: headers only, everything cross-checked, nothing executed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from glmconv.basics.digest import digest_bytes
from glmconv.basics.errors import DataError, Defect
from glmconv.basics.json_files import MAX_INDEX, parse_json, read_bounded, read_json
from glmconv.formats.safetensors.header import Header, read_header
from glmconv.formats.stored import StoredChunk, StoredTensor
from glmconv.storage.local import identify
from glmconv.storage.objects import StorageObject

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_NAME = 255
"""Bytes of a file name, as Linux filesystems limit them."""


@dataclass(slots=True)
class HfCheckpoint:
    """A checkpoint's headers. ``headers`` keeps the order of shards; ``stored`` names all tensors."""

    path: Path
    config: dict[str, Any]
    files: list[StorageObject] = field(default_factory=list)
    headers: dict[str, Header] = field(default_factory=dict)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    index: bytes | None = None


def open_hf(path: Path) -> HfCheckpoint:
    """Open the checkpoint in directory ``path``.

    Raises StorageError for what cannot be read, DataError with every defect of headers and index.
    """
    checkpoint = HfCheckpoint(path, read_json(path / "config.json"))
    weight_map = _weight_map(checkpoint)
    defects: list[Defect] = []
    for name in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]:
        file = path / name
        if not file.is_file():
            defects.append(Defect("missing-file", "named by the index, does not exist", str(file)))
            continue
        try:
            _add_shard(checkpoint, name, file, defects)
        except DataError as error:
            defects += error.defects or [Defect("header", error.what, error.where, error.hint)]
    if weight_map is not None:
        defects += _against_index(checkpoint, weight_map)
    if defects:
        raise DataError("the checkpoint's files are wrong", where=str(path), defects=defects)
    return checkpoint


def _add_shard(checkpoint: HfCheckpoint, name: str, file: Path, defects: list[Defect]) -> None:
    header = read_header(file)
    number = len(checkpoint.files)
    checkpoint.files.append(identify(file, digest_bytes(header.text)))
    checkpoint.headers[name] = header
    for entry in header.entries:
        if entry.name in checkpoint.stored:
            defects.append(Defect("duplicate", "is in two files", f"{file}: {entry.name}"))
        whole = StoredChunk((0,) * len(entry.shape), entry.shape, number, header.data_start + entry.begin)
        checkpoint.stored[entry.name] = StoredTensor(entry.name, entry.dtype, entry.shape, [whole])


def _weight_map(checkpoint: HfCheckpoint) -> dict[str, str] | None:
    path = checkpoint.path / INDEX
    if not path.is_file():
        if not (checkpoint.path / SINGLE).is_file():
            raise DataError(
                f"neither {INDEX} nor {SINGLE} is there",
                where=str(checkpoint.path),
                hint="glmconv reads safetensors; for other formats save with safetensors first",
            )
        return None
    checkpoint.index = read_bounded(path, MAX_INDEX)
    return index_map(parse_json(checkpoint.index, str(path)), str(path))


def index_map(content: dict[str, Any], where: str) -> dict[str, str]:
    """The ``weight_map`` of an index: tensor to file. Raises DataError."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DataError("has no weight_map of strings", where=where)
    bad = sorted(file for file in set(weight_map.values()) if not plain_name(file))
    if bad:
        raise DataError(
            "names files outside the checkpoint's directory, or spells them oddly",
            where=where,
            defects=[Defect("path", "not a plain file name inside the directory", file) for file in bad],
        )
    return weight_map


def plain_name(name: str) -> bool:
    """Whether a file name found in a checkpoint is one, spelt plainly, inside its directory."""
    pure = PurePosixPath(name)
    try:
        longest = max((len(os.fsencode(part)) for part in pure.parts), default=0)
    except UnicodeEncodeError:
        return False
    inside = not pure.is_absolute() and ".." not in pure.parts and str(pure) == name and name != "."
    return inside and "\0" not in name and longest <= MAX_NAME


def _against_index(checkpoint: HfCheckpoint, weight_map: dict[str, str]) -> Iterator[Defect]:
    where = {entry.name: file for file, header in checkpoint.headers.items() for entry in header.entries}
    for name, file in weight_map.items():
        if file in checkpoint.headers and where.get(name) != file:
            actual = where.get(name)
            yield Defect(
                "index",
                f"the index says {file}, the tensor is in {actual}" if actual else f"{file} does not hold it",
                name,
                "rebuild the index, or download the file again",
            )
    for name, file in where.items():
        if name not in weight_map:
            yield Defect("index", "in the file but not in the index", f"{file}: {name}", "rebuild the index")
