"""From an interpreted ``.metadata`` pickle to entries, with everything that is wrong collected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeGuard

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, Defect
from glmconv.formats.torchdist.coverage import fault_of
from glmconv.formats.torchdist.entries import Chunk, Metadata, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.pickle.restricted import Global, Node
from glmconv.formats.torchdist.pickle.shortcuts import INDEX, STORED, TENSOR

METADATA = "torch.distributed.checkpoint.metadata.Metadata"
OBJECT = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"

_Key = tuple[str, tuple[int, ...] | None]
_Place = tuple[str, int, int]
"""Name and offsets of a chunk (None for an object); file, offset and length of its record."""


def entries_of(value: Any, where: str) -> Metadata:
    """Entries of an interpreted ``Metadata``. Raises :class:`DataError` with all defects."""
    state = _state_of(value, METADATA)
    if state is None:
        raise DataError("holds no torch.distributed.checkpoint Metadata", where=where)
    return _Reading(state, where).result()


def _state_of(value: Any, path: str) -> Any:
    """State of an object of that class, else None."""
    if isinstance(value, Node) and value.target.path == path:
        return value.state
    return None


class _Reading:
    """From the interpreted pickle to entries, collecting defects."""

    def __init__(self, state: Any, where: str) -> None:
        self.where = where
        self.defects: list[Defect] = []
        self.warnings: list[Defect] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.names = self._mapping(state, "state_dict_metadata")
        self.places = self._places(self._mapping(state, "storage_data"))

    def result(self) -> Metadata:
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        for name, value in self.names.items():
            if not isinstance(name, str) or not isinstance(value, Node):
                self._defect("metadata", f"{_shown(name)} is not a name of a tensor or object")
            elif value.target.path == OBJECT:
                self._add_object(objects, name)
            elif value.target.path == TENSOR:
                self._add_tensor(tensors, name, value.state)
            else:
                self._defect("metadata", f"{name} is a {value.target.path}, not a tensor or object")
        for name, offsets in self.places:
            at = "" if offsets is None else f" at {list(offsets)}"
            what = f"data of {name}{at} is stored, but nothing refers to it"
            self.warnings.append(Defect("unexpected", what, severity="warning"))
        if self.defects:
            raise DataError(f"{len(self.defects)} defects in it", where=self.where, defects=self.defects)
        return Metadata(tensors, objects, tuple(self.warnings))

    def _is_shape(self, value: Any) -> TypeGuard[tuple[int, ...]]:
        """Whether it is a tuple of sizes; remembers objects, since many are shared."""
        if id(value) in self.shapes:
            return True
        good = isinstance(value, tuple) and len(value) <= 64 and all(map(_is_size, value))
        if good:
            self.shapes[id(value)] = value
        return good

    def _defect(self, kind: str, what: str) -> None:
        self.defects.append(Defect(kind, what))

    def _mapping(self, state: Any, key: str) -> dict[Any, Any]:
        value = state.get(key) if isinstance(state, dict) else None
        if not isinstance(value, dict):
            raise DataError(f"its Metadata has no mapping {key}", where=self.where)
        return value

    def _places(self, stored: dict[Any, Any]) -> dict[_Key, _Place]:
        """Place of each stored chunk and object."""
        places: dict[_Key, _Place] = {}
        paths: set[str] = set()
        for index, info in stored.items():
            key, place = _state_of(index, INDEX), _state_of(info, STORED)
            if key is None or place is None or not isinstance(key[0], str):
                self._defect("metadata", "its storage_data holds an entry that is not a place")
                continue
            name, offsets, _ = key
            path, offset, length, transforms = place
            if not (offsets is None or self._is_shape(offsets)):
                self._defect("metadata", f"{name} has a place for a chunk without offsets")
            elif not (_is_size(offset) and _is_size(length)):
                self._defect("metadata", f"{name} has a place without offset and length")
            elif not (isinstance(path, str) and (path in paths or _stays_inside(path))):
                self._defect(
                    "path", f"{name} lies in {_shown(path)}, which is not a path inside the checkpoint"
                )
            elif transforms:
                self._defect(
                    "transform", f"{name} is stored compressed or encrypted; only plain records are read"
                )
            elif (name, offsets) in places:
                self._defect("duplicate", f"{name} has two places for its chunk at {offsets}")
            else:
                paths.add(path)
                places[name, offsets] = (path, offset, length)
        return places

    def _add_object(self, objects: dict[str, ObjectEntry], name: str) -> None:
        place = self.places.pop((name, None), None)
        if place is None:
            self._defect("missing", f"object {name} has no place in storage_data")
        else:
            objects[name] = ObjectEntry(*place)

    def _add_tensor(self, tensors: dict[str, TensorEntry], name: str, state: Any) -> None:
        fields = state if isinstance(state, dict) else {}
        shape, chunks = fields.get("size"), fields.get("chunks")
        if not self._is_shape(shape) or not isinstance(chunks, list):
            self._defect("metadata", f"tensor {name} has no shape or no list of chunks")
            return
        dtype = self._dtype(name, fields.get("properties"))
        if dtype is None:
            return
        entry = TensorEntry(dtype, shape, tuple(self._chunks(name, dtype, chunks)))
        fault = fault_of(entry) if len(entry.chunks) == len(chunks) else ""
        if fault:
            self._defect("chunks", f"tensor {name}: {fault}")
        tensors[name] = entry

    def _chunks(self, name: str, dtype: DType, chunks: list[Any]) -> Iterator[Chunk]:
        itemsize = dtype.itemsize
        for chunk in chunks:
            box = chunk.state if isinstance(chunk, Node) else None
            offsets, sizes = box if isinstance(box, tuple) and len(box) == 2 else (None, None)
            if not (self._is_shape(offsets) and self._is_shape(sizes)):
                self._defect("metadata", f"tensor {name} has a chunk without offsets and sizes")
                continue
            place = self.places.pop((name, offsets), None)
            if place is None:
                self._defect("missing", f"tensor {name} has no place for its chunk at {list(offsets)}")
                continue
            needed = math.prod(sizes) * itemsize
            if place[2] < needed:
                at = f"tensor {name}: chunk at {list(offsets)}"
                self._defect("length", f"{at} needs {needed} bytes, its record has {place[2]}")
            yield Chunk(offsets, sizes, *place)

    def _dtype(self, name: str, properties: Any) -> DType | None:
        """Dtype of a TensorProperties, or None and a defect."""
        state = properties.state if isinstance(properties, Node) else None
        named = state[0] if isinstance(state, tuple) and state else None
        label = named.path.removeprefix("torch.") if isinstance(named, Global) else _shown(named)
        dtype = BY_TORCH_NAME.get(label)
        if dtype is None:
            self._defect("dtype", f"tensor {name} has dtype {label}, which is not handled")
        return dtype


def _shown(value: Any) -> str:
    """A foreign value in a message: containers may hold themselves, so only texts are shown."""
    return repr(value[:200]) if isinstance(value, str) else f"a {type(value).__name__}"


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _stays_inside(path: Any) -> bool:
    """Whether a stored path is relative, plain and does not climb."""
    if not isinstance(path, str) or not path or "\0" in path or path.startswith("/") or "://" in path:
        return False
    return ".." not in PurePosixPath(path).parts
