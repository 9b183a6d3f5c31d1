"""Read ``.metadata``: where each tensor and object of a ``torch_dist`` checkpoint lies.

Everything that is wrong is listed at once. The file is untrusted: its pickle is interpreted by
``pickles`` and never run, and its paths may not leave the checkpoint's directory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glmconv.basics.dtypes import BY_TORCH_NAME
from glmconv.basics.errors import DataError, Defect, StorageError
from glmconv.formats.torchdist.entries import Chunk, Metadata, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.metadata_reading import METADATA, OBJECT, entries_of
from glmconv.formats.torchdist.pickle.restricted import Policy, loads
from glmconv.formats.torchdist.pickle.shortcuts import FIELDS, TENSOR, Shortcuts
from glmconv.formats.torchdist.record import payload_offset

__all__ = [
    "Chunk",
    "Metadata",
    "ObjectEntry",
    "TensorEntry",
    "check_files",
    "parse_metadata",
    "payload_offsets",
    "read_metadata",
]

FILE_NAME = ".metadata"

MAX_BYTES = 512 << 20
"""Size from which on a ``.metadata`` file is refused; 60,000 tensors need some 20 MB."""

_DCP = "torch.distributed.checkpoint"
_OLD_SHARD = "torch.distributed._shard.sharded_tensor.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")

ALLOWED = frozenset(
    [
        *(METADATA, TENSOR, OBJECT, *FIELDS),
        *(f"{_DCP}.metadata.{name}" for name in ("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_OLD_SHARD}.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
        *(f"{_DCP}.planner.{name}" for name in _PLANNER),
        *(f"{_MCORE}.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
        *(f"torch.{name}" for name in BY_TORCH_NAME),
        *(
            f"torch.{name}"
            for name in ("Size", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")
        ),
        *("torch.serialization._get_layout", "collections.OrderedDict"),
        *("builtins.set", "builtins.frozenset", "pathlib.PosixPath", "pathlib._local.PosixPath"),
    ]
)
"""What a ``.metadata`` file may name (torch 2.x, megatron-core 0.6 to 0.19)."""

# megatron-core saves every rank's plan behind the rest; nothing in it tells where data lies.
_STOP_AT = frozenset({"all_local_plans", "mcore_data"})


def read_metadata(unit_dir: Path) -> Metadata:
    """Content of ``unit_dir/.metadata``, checked against itself and the sizes of the files.

    Raises :class:`DataError` with all defects, or :class:`StorageError` if the file is not there.
    """
    path = unit_dir / FILE_NAME
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"is {size} bytes, more than the {MAX_BYTES} that are read", where=str(path))
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read it: {error.strerror}",
            where=str(path),
            hint="pass a directory that holds a complete torch_dist checkpoint",
        ) from error
    metadata = parse_metadata(data, str(path))
    defects = check_files(metadata, unit_dir)
    if defects:
        raise DataError(f"{len(defects)} defects in the checkpoint", where=str(path), defects=defects)
    return metadata


def parse_metadata(data: bytes, where: str) -> Metadata:
    """Content of the bytes of a ``.metadata`` file, checked against itself alone."""
    policy = Policy(allowed=ALLOWED, shortcuts=Shortcuts().table(), fields=FIELDS, stop_at=_STOP_AT)
    with _collection_paused():
        return entries_of(loads(data, where, policy), where)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Millions of long-lived objects come to be, and each generation would be walked many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_files(metadata: Metadata, unit_dir: Path) -> list[Defect]:
    """Files that are missing, and records that end behind the end of their file."""
    ends: dict[str, tuple[int, str]] = {}
    for name, place in _all_places(metadata):
        end = place.offset + place.length
        if end > ends.get(place.file, (-1, ""))[0]:
            ends[place.file] = (end, name)
    defects = []
    for file, (end, name) in ends.items():
        try:
            size = os.stat(unit_dir / file).st_size
        except OSError as error:
            defects.append(Defect("missing-file", f"{name} lies in it, but {error.strerror}", where=file))
            continue
        if end > size:
            what = f"{name} ends at byte {end}, the file at {size}"
            defects.append(Defect("truncated", what, where=file, hint="copy it again"))
    return defects


def _all_places(metadata: Metadata) -> Iterator[tuple[str, Chunk | ObjectEntry]]:
    for name, entry in metadata.tensors.items():
        for chunk in entry.chunks:
            yield name, chunk
    yield from metadata.objects.items()


def payload_offsets(
    unit_dir: Path, metadata: Metadata, names: Iterable[str] | None = None
) -> dict[str, tuple[int, ...]]:
    """Absolute offset in its file of the payload of each chunk, in the order of ``entry.chunks``.

    Proves on the way that each record holds a tensor of the dtype and shape that ``.metadata``
    says. Raises :class:`DataError` with every record that does not.
    """
    by_file: dict[str, list[tuple[str, int]]] = {}
    offsets: dict[str, list[int]] = {}
    for name in metadata.tensors if names is None else names:
        chunks = metadata.tensors[name].chunks
        offsets[name] = [0] * len(chunks)
        for index, chunk in enumerate(chunks):
            by_file.setdefault(chunk.file, []).append((name, index))
    defects: list[Defect] = []
    for file, wanted in sorted(by_file.items()):
        with _opened(unit_dir / file) as fd:
            for name, index in wanted:
                entry, chunk = metadata.tensors[name], metadata.tensors[name].chunks[index]
                where = f"{file}: {name} at {list(chunk.offsets)}"
                try:
                    offsets[name][index] = payload_offset(
                        fd, entry.dtype, chunk.sizes, chunk.offset, chunk.length, where
                    )
                except DataError as error:
                    defects.append(Defect("record", error.what, where))
    if defects:
        raise DataError(f"{len(defects)} records are not sound", where=str(unit_dir), defects=defects)
    return {name: tuple(values) for name, values in offsets.items()}


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open it: {error.strerror}", where=str(path)) from error
    try:
        if hasattr(os, "posix_fadvise"):
            # One small read a record: read-ahead would fetch far more of a cold file than is used.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fd
    finally:
        os.close(fd)
