"""Write ``.metadata`` without torch: the pickle that torch's own classes would give, opcode by opcode.

``pickle.load`` with torch present makes the same objects as ``torch.distributed.checkpoint`` does:
``Metadata(state_dict_metadata, planner_data=None, storage_data, storage_meta, version="1.0.0")``.
"""

from __future__ import annotations

from collections.abc import Mapping

from glmconv.basics.dtypes import DType
from glmconv.formats.torchdist.entries import Chunk, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.pickle.writing import PickleWriter, integer, plain_tuple

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def metadata_bytes(tensors: Mapping[str, TensorEntry], objects: Mapping[str, ObjectEntry]) -> bytes:
    """Content of a ``.metadata`` file, the same bytes for the same entries in the same order.

    Several objects may share one place (torch's and megatron-core's readers seek to each).
    """
    writer = _Writer()
    return writer.metadata(tensors, objects)


class _Writer(PickleWriter):
    """The classes of torch's distributed checkpoint as opcodes, in the order that torch writes them.

    Equal texts, shapes and properties are written once and referred to afterwards.
    """

    def metadata(self, tensors: Mapping[str, TensorEntry], objects: Mapping[str, ObjectEntry]) -> bytes:
        out = self.out
        out += [self.begin(_METADATA, "Metadata"), self.text("state_dict_metadata"), b"}("]
        for name, entry in tensors.items():
            self._tensor(name, entry)
            self.gather()
        for name in objects:
            out += [self.text(name), self.named(_METADATA, "BytesStorageMetadata"), b")\x81"]
        out += [b"u", self.text("planner_data"), b"N", self.text("storage_data"), b"}("]
        for name, entry in tensors.items():
            for chunk in entry.chunks:
                self._stored(name, chunk, chunk.offsets)
            self.gather()
        for name, place in objects.items():
            self._stored(name, place, None)
        out += [b"u", self.text("storage_meta")]
        self._storage_meta()
        out += [self.text("version"), self.text("1.0.0"), b"ub"]
        return self.pickle()

    def _size(self, shape: tuple[int, ...]) -> bytes:
        """A ``torch.Size``."""
        known = self.known(shape)
        if known is not None:
            return known
        opcodes = self.named("torch", "Size") + plain_tuple([integer(size) for size in shape])
        opcodes += (self.memoize() if shape else b"") + b"\x85" + self.memoize()
        return opcodes + b"R" + self.memoize(shape)

    def _tensor(self, name: str, entry: TensorEntry) -> None:
        out = self.out
        out += [self.text(name), self.begin(_METADATA, "TensorStorageMetadata")]
        out += [self.text("properties"), self.known(entry.dtype) or self._properties(entry.dtype)]
        out += [self.text("size"), self._size(entry.shape), self.text("chunks"), b"]", self.memoize(), b"("]
        for chunk in entry.chunks:
            out += [
                self.begin(_METADATA, "ChunkStorageMetadata"),
                self.text("offsets"),
                self._size(chunk.offsets),
            ]
            out += [self.text("sizes"), self._size(chunk.sizes), b"ub"]
        out.append(b"eub")

    def _properties(self, dtype: DType) -> bytes:
        """TensorProperties: dtype, layout, requires_grad, memory format, pin_memory."""
        opcodes = self.named(_METADATA, "TensorProperties") + b")\x81"
        opcodes += self.memoize(dtype) + b"(" + self.named("torch", dtype.torch_name)
        layout = self.named("torch.serialization", "_get_layout") + self.text("torch.strided") + b"\x85R"
        contiguous = self.named(_METADATA, "_MEM_FORMAT_ENCODING") + integer(0) + b"\x85R"
        return opcodes + layout + b"\x89" + contiguous + b"\x89tb"

    def _stored(self, name: str, place: Chunk | ObjectEntry, offsets: tuple[int, ...] | None) -> None:
        """MetadataIndex and _StorageInfo. An index without offset takes the class's default, None."""
        out = self.out
        out += [
            self.begin(_METADATA, "MetadataIndex"),
            self.text("fqn"),
            self.text(name),
            self.text("index"),
            b"N",
        ]
        if offsets is not None:
            out += [self.text("offset"), self._size(offsets)]
        out += [
            b"ub",
            self.begin(_FILESYSTEM, "_StorageInfo"),
            self.text("relative_path"),
            self.text(place.file),
        ]
        out += [self.text("offset"), integer(place.offset), self.text("length"), integer(place.length), b"ub"]

    def _storage_meta(self) -> None:
        """StorageMeta() as a checkpoint has it that no run wrote: no ids, no modules."""
        self.out += [self.begin(_METADATA, "StorageMeta")]
        for name in ("checkpoint_id", "save_id", "load_id"):
            self.out += [self.text(name), b"N"]
        self.out += [self.text("modules"), b"]ub"]
