"""One record of a ``.distcp`` file: the ``torch.save`` archive of a single tensor.

What :func:`frame` gives is byte for byte what ``torch.save`` (torch 2.13) writes under
``torch.serialization.set_crc32_options(False)``: every CRC is 0, so that the bytes around a
payload depend on its dtype and shape alone. Torch's readers do not check the CRC; zip tools do.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.archive import Archive, ArchiveReader
from glmconv.formats.torchdist.pickle.restricted import Global, Node, Persistent, Policy, loads
from glmconv.formats.torchdist.pickle.writing import integer, plain_tuple, text
from glmconv.formats.torchdist.pickle.writing import named as named_global

MAX_PAYLOAD = (1 << 32) - 4096
"""Bytes that a payload must stay below: a record of 4 GiB would need the zip64 form, another head.

The writer cuts what is larger into several records (``writer``); records of others are read in either form.
"""

# Hash of the members' names, then of the CRCs (all 0) of those that are not empty.
_SERIALIZATION_ID = b"1572819951185464302603005401530805769991"
_SERIALIZATION_ID_EMPTY = b"1572819951185464302600046082544174525093"

# Dtypes that torch pickles by a storage class of their own; others by the dtype itself.
_STORAGE_OF_DTYPE = {
    DType.BOOL: "BoolStorage",
    DType.U8: "ByteStorage",
    DType.I8: "CharStorage",
    DType.I16: "ShortStorage",
    DType.I32: "IntStorage",
    DType.I64: "LongStorage",
    DType.F16: "HalfStorage",
    DType.BF16: "BFloat16Storage",
    DType.F32: "FloatStorage",
    DType.F64: "DoubleStorage",
}
DTYPE_OF_STORAGE = {f"torch.{name}": dtype for dtype, name in _STORAGE_OF_DTYPE.items()}

TENSOR_GLOBALS = frozenset(
    [
        *(
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
            "torch.storage.UntypedStorage",
        ),
        *("torch._utils._rebuild_parameter", "collections.OrderedDict", "torch.Size"),
        *DTYPE_OF_STORAGE,
        *(f"torch.{name}" for name in BY_TORCH_NAME),
    ]
)
"""What the pickle of a tensor may name."""

_POLICY = Policy(allowed=TENSOR_GLOBALS, persistent=True)
_MAX_PICKLE = 1 << 16


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes before and after a payload of ``payload`` bytes."""

    head: bytes
    tail: bytes
    payload: int

    @property
    def length(self) -> int:
        """Bytes of the whole record, as ``_StorageInfo.length`` counts them."""
        return len(self.head) + self.payload + len(self.tail)


def payload_bytes(dtype: DType, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


@lru_cache(maxsize=4096)
def frame(dtype: DType, shape: tuple[int, ...]) -> Frame:
    """The bytes around the payload of a tensor of this dtype and shape.

    ``head + payload + tail`` loads by ``torch.load(weights_only=True)``, by torch's DCP
    ``FileSystemReader`` and by megatron-core. ``len(head)`` is a multiple of 64. Raises
    :class:`DataError` where the record would reach 4 GiB.
    """
    return _frame(dtype, shape, lambda data: 0)


def _frame(dtype: DType, shape: tuple[int, ...], checksum: Callable[[bytes], int]) -> Frame:
    payload = payload_bytes(dtype, shape)
    if payload >= MAX_PAYLOAD:
        raise DataError(
            f"a {dtype.label} tensor of shape {list(shape)} has {payload} bytes, and a record of a "
            "torch_dist file must stay under 4 GiB",
            hint="cut it into several chunks along its first dimensions",
        )
    archive = Archive(checksum)
    head = [archive.member("data.pkl", tensor_pickle(dtype, shape))]
    head += [archive.member(".format_version", b"1"), archive.member(".storage_alignment", b"64")]
    head += [archive.member("byteorder", b"little"), archive.open("data/0", payload)]
    tail = [archive.close(payload), archive.member("version", b"3\n")]
    identity = _SERIALIZATION_ID if payload else _SERIALIZATION_ID_EMPTY
    tail += [archive.member(".data/serialization_id", identity), archive.end()]
    return Frame(b"".join(head), b"".join(tail), payload)


def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """``data.pkl`` of a contiguous CPU tensor, as C ``pickle`` writes it in protocol 2."""
    storage = _STORAGE_OF_DTYPE.get(dtype)
    memo = iter(range(256))

    def put(data: bytes) -> bytes:
        return data + b"q" + bytes([next(memo)])

    def sizes(values: Sequence[int]) -> bytes:
        made = plain_tuple([integer(value) for value in values])
        return put(made) if values else made

    rebuild = "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"
    out = [b"\x80\x02", put(named_global("torch._utils", rebuild)), b"((", put(text("storage"))]
    out.append(
        put(named_global("torch", storage) if storage else named_global("torch.storage", "UntypedStorage"))
    )
    # An untyped storage counts bytes, a typed one elements.
    count = math.prod(shape) * (1 if storage else dtype.itemsize)
    out += [put(text("0")), put(text("cpu")), integer(count), put(b"t"), b"Q", integer(0)]
    out += [sizes(shape), sizes(contiguous_strides(shape))]
    out += [b"\x89", put(named_global("collections", "OrderedDict")), put(b")R")]
    if storage is None:
        out.append(put(named_global("torch", dtype.torch_name)))
    out += [put(b"t"), put(b"R"), b"."]
    return b"".join(out)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension (a dimension of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the pickle of a tensor says. ``offset`` and ``strides`` count elements of the storage."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in the storage, in order."""
        expected = contiguous_strides(self.shape)
        pairs = zip(self.shape, self.strides, expected, strict=True)
        return all(size <= 1 or stride == wanted for size, stride, wanted in pairs)


def stored_tensor(node: Any) -> StoredTensor | None:
    """The tensor that an interpreted pickle describes, or None if it describes something else."""
    if isinstance(node, Node) and node.target.path == "torch._utils._rebuild_parameter" and node.args:
        node = node.args[0]
    if not isinstance(node, Node) or not isinstance(node.args, tuple) or len(node.args) < 6:
        return None
    version = node.target.path.removeprefix("torch._utils._rebuild_tensor_v")
    storage, offset, shape, strides = node.args[:4]
    place = storage.key if isinstance(storage, Persistent) else None
    if version not in ("2", "3") or not (isinstance(place, tuple) and len(place) == 5):
        return None
    dtype = _dtype_of(node.args[6] if version == "3" and len(node.args) > 6 else place[1])
    sound = _are_sizes(shape) and _are_sizes(strides) and _are_sizes((offset,)) and isinstance(place[2], str)
    if dtype is None or not sound or len(shape) != len(strides):
        return None
    return StoredTensor(dtype, shape, strides, offset, place[2])


def _dtype_of(named: Any) -> DType | None:
    """Dtype that a storage class or a dtype names."""
    path = named.path if isinstance(named, Global) else ""
    return DTYPE_OF_STORAGE.get(path) or BY_TORCH_NAME.get(path.removeprefix("torch."))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def payload_offset(
    fd: int, dtype: DType, shape: tuple[int, ...], offset: int, length: int, where: str
) -> int:
    """Absolute offset of the payload of the record at ``offset`` of an open file.

    Proves that the record holds a contiguous tensor of this dtype and shape. Thread-safe (``pread``).
    Raises :class:`DataError` naming ``where``, or :class:`StorageError` if reading fails.
    """
    for head, whole in _known_heads(dtype, shape):
        if length == whole and pread(fd, len(head), offset, where) == head:
            end = os.fstat(fd).st_size
            if end < offset + length:
                raise DataError(f"ends at byte {end}, {offset + length - end} bytes early", where=where)
            return offset + len(head)
    reader = ArchiveReader(
        lambda at, size: pread(fd, size, offset + at, where), length, where, max_members=64
    )
    tensor = stored_tensor(loads(reader.bytes_of("data.pkl", _MAX_PICKLE), where, _POLICY))
    if tensor is None:
        raise DataError("the record does not hold a tensor", where=where)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise DataError(
            f"the record holds {tensor.dtype.label} {list(tensor.shape)}, "
            f"but .metadata says {dtype.label} {list(shape)}",
            where=where,
        )
    if "byteorder" in reader.names() and reader.bytes_of("byteorder", 16) != b"little":
        raise DataError("the record was written on a big-endian machine", where=where)
    if not tensor.is_contiguous or tensor.key.startswith("."):
        raise DataError(
            f"the record holds a strided view {list(tensor.strides)}, not plain rows", where=where
        )
    data = reader.member(f"data/{tensor.key}")
    start, size = tensor.offset * dtype.itemsize, payload_bytes(dtype, shape)
    if start + size > data.size:
        raise DataError(
            f"the record's storage has {data.size} bytes, its tensor ends at {start + size}", where=where
        )
    return offset + data.offset + start


@lru_cache(maxsize=4096)
def _known_heads(dtype: DType, shape: tuple[int, ...]) -> tuple[tuple[bytes, int], ...]:
    """Heads and lengths of the record as torch 2.13 writes it, without and with CRCs."""
    if payload_bytes(dtype, shape) >= MAX_PAYLOAD:
        return ()
    return tuple((made.head, made.length) for made in (frame(dtype, shape), _frame(dtype, shape, zlib.crc32)))


def pread(fd: int, size: int, offset: int, where: str) -> bytes:
    """Exactly ``size`` bytes at ``offset``; :class:`DataError` if the file ends before."""
    parts = []
    while size > 0:
        try:
            part = os.pread(fd, min(size, 1 << 30), offset)
        except OSError as error:
            raise StorageError(f"cannot read it: {error.strerror}", where=where) from error
        if not part:
            raise DataError(f"ends at byte {offset}, {size} bytes early", where=where)
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
