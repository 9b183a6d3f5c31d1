"""The state beside the tensors: ``common.pt``, or the object ``common_state`` of megatron-core 0.19.

Read without running anything: objects of classes other than ``argparse.Namespace`` become
:class:`Opaque`, tensors become :class:`StoredValue`.
"""

from __future__ import annotations

import os
import struct
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.archive import ArchiveReader, saved
from glmconv.formats.torchdist.entries import Metadata, ObjectEntry
from glmconv.formats.torchdist.pickle.restricted import Global, Node, Persistent, Policy, loads
from glmconv.formats.torchdist.pickle.writing import integer, named, plain_tuple, text
from glmconv.formats.torchdist.record import payload_bytes, pread, stored_tensor

__all__ = [
    "COMMON_FILE",
    "COMMON_OBJECT",
    "METADATA_JSON",
    "Opaque",
    "StoredValue",
    "common_state",
    "read_archive",
    "read_common",
    "read_scalars",
    "write_common",
]

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Where megatron-core 0.19 keeps the same state, as a list of one."""

METADATA_JSON = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
"""Content of ``metadata.json`` (megatron-core, dist_checkpointing/core.py, CheckpointingConfig)."""

MAX_PICKLE = 64 << 20
MAX_VALUES = 500_000
MAX_DEPTH = 64
MAX_INLINE = 4096
MAX_INLINE_SUM = 16 << 20
"""Limits of what is read: bytes of pickle, values, their nesting, bytes of one and of all tensors."""

_ANYTHING = Policy(persistent=True)
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_SCALAR_FORMAT = {DType.BOOL: "?", DType.I32: "<i", DType.I64: "<q", DType.F32: "<f", DType.F64: "<d"}


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An object that the pickle describes and nobody made: ``path`` is its class or function."""

    path: str
    args: Any = ()


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A tensor in the common state. ``data`` are its bytes if they are few, else None."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | None = None

    def scalar(self) -> int | float | bool | None:
        """Value of a tensor of one element, if its dtype is a common one."""
        form = _SCALAR_FORMAT.get(self.dtype)
        if form is None or self.data is None or len(self.data) != struct.calcsize(form):
            return None
        value: int | float | bool = struct.unpack(form, self.data)[0]
        return value


def common_state(args: Namespace, *, iteration: int = 0, per_layer: bool = False) -> dict[str, Any]:
    """What a trainer looks for beside the weights of a checkpoint without optimizer.

    ``checkpoint_version`` 3.0, since a loader that misses it reorders the rows of QKV.
    ``content_metadata`` is what megatron-core builds the expected names from.
    """
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if per_layer:
        content["non_homogeneous_layers"] = True
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": content,
        "num_floating_point_operations_so_far": 0,
    }


def write_common(state: Mapping[str, Any]) -> bytes:
    """``torch.save`` of a dictionary of plain values, Namespaces and DTypes (as torch dtypes).

    Loads with ``torch.load(weights_only=True)`` where megatron-core has registered Namespace.
    """
    return saved(b"\x80\x02" + _pickled(dict(state)) + b".")


def _pickled(value: Any) -> bytes:
    """Opcodes of protocol 2; the values are ours, so their nesting is small."""
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise TypeError(f"a common state holds no {type(value).__name__}")
    return writer(value)


def _pickled_dict(value: Mapping[Any, Any]) -> bytes:
    return b"}(" + b"".join(_pickled(key) + _pickled(item) for key, item in value.items()) + b"u"


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: integer,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: text,
    DType: lambda value: named("torch", value.torch_name),
    tuple: lambda value: plain_tuple([_pickled(item) for item in value]),
    list: lambda value: b"](" + b"".join(map(_pickled, value)) + b"e",
    dict: _pickled_dict,
    Namespace: lambda value: named("argparse", "Namespace") + b")\x81" + _pickled_dict(vars(value)) + b"b",
}


def read_common(unit_dir: Path, metadata: Metadata | None = None) -> dict[str, Any]:
    """The common state, from ``common.pt`` or the object ``common_state``.

    Raises :class:`DataError` if it is in neither, or is not a dictionary, or is hostile.
    """
    path = unit_dir / COMMON_FILE
    place = metadata.objects.get(COMMON_OBJECT) if metadata is not None else None
    if path.is_file():
        value = read_archive(path)
    elif place is not None:
        path = unit_dir / place.file
        value = read_archive(path, place)
        value = value[0] if isinstance(value, list) and len(value) == 1 else None
    else:
        raise DataError(
            f"has neither {COMMON_FILE} nor the object {COMMON_OBJECT}",
            where=str(unit_dir),
            hint="pass a complete torch_dist checkpoint of megatron-core",
        )
    if not isinstance(value, dict):
        raise DataError("holds no dictionary of common state", where=str(path))
    return value


def read_scalars(path: Path) -> dict[str, int | float | bool]:
    """The numbers in a saved dictionary of numbers and tensors of one element (``train_state.pt``)."""
    value = read_archive(path)
    if not isinstance(value, dict):
        raise DataError("holds no dictionary", where=str(path))
    scalars = {}
    for key, item in value.items():
        number = item.scalar() if isinstance(item, StoredValue) else item
        if isinstance(key, str) and isinstance(number, (int, float)):
            scalars[key] = number
    return scalars


def read_archive(path: Path, place: ObjectEntry | None = None) -> Any:
    """Value of a ``torch.save`` file, or of one at a place in a larger file, without running it.

    Raises :class:`DataError` for anything broken or excessive, :class:`StorageError` if it cannot
    be opened.
    """
    where = str(path)
    with ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            size = os.fstat(fd).st_size
        except OSError as error:
            raise StorageError(f"cannot open it: {error.strerror}", where=where) from error
        start, length = (place.offset, place.length) if place else (0, size)
        archive = ArchiveReader(lambda at, count: pread(fd, count, start + at, where), length, where)
        value = loads(archive.bytes_of("data.pkl", MAX_PICKLE), where, _ANYTHING)
        return _Plain(archive, where).of(value, MAX_DEPTH)


class _Plain:
    """From interpreted pickles to plain values, with bounds on their number and nesting."""

    def __init__(self, archive: ArchiveReader, where: str) -> None:
        self.archive = archive
        self.where = where
        self.left = MAX_VALUES
        self.inline = MAX_INLINE_SUM

    def of(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if depth == 0 or self.left < 0:
            raise DataError(
                f"nests deeper than {MAX_DEPTH} or holds over {MAX_VALUES} values", where=self.where
            )
        if isinstance(value, list):
            return [self.of(item, depth - 1) for item in value]
        if isinstance(value, tuple):
            return tuple([self.of(item, depth - 1) for item in value])
        if isinstance(value, dict):
            return {self._key(key, depth): self.of(item, depth - 1) for key, item in value.items()}
        if isinstance(value, Global):
            return BY_TORCH_NAME.get(value.path.removeprefix("torch."), Opaque(value.path))
        if isinstance(value, Node):
            return self._node(value, depth)
        return Opaque("storage") if isinstance(value, Persistent) else value

    def _key(self, key: Any, depth: int) -> Any:
        made = self.of(key, depth - 1) if isinstance(key, (Node, Global, tuple)) else key
        if isinstance(made, Namespace):
            raise DataError("has a key that is a Namespace, which cannot be one", where=self.where)
        return made

    def _node(self, node: Node, depth: int) -> Any:
        tensor = stored_tensor(node)
        if tensor is not None:
            size = payload_bytes(tensor.dtype, tensor.shape)
            if not tensor.is_contiguous or size > min(MAX_INLINE, self.inline):
                return StoredValue(tensor.dtype, tensor.shape)
            self.inline -= size
            start = tensor.offset * tensor.dtype.itemsize
            data = self.archive.part_of(f"data/{tensor.key}", start, size)
            return StoredValue(tensor.dtype, tensor.shape, data)
        path = node.target.path
        if path in _NAMESPACES and isinstance(node.state, dict):
            namespace = Namespace()
            attributes = self.of(node.state, depth - 1)
            vars(namespace).update({key: item for key, item in attributes.items() if isinstance(key, str)})
            return namespace
        return Opaque(path, self.of(node.args, depth - 1))
