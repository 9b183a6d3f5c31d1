"""What a ``torch_dist`` checkpoint holds: tensors in chunks, and objects, each with its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored as one record.

    ``offsets`` and ``sizes`` count elements in each dimension. The record lies at byte ``offset``
    of ``file`` (relative to the unit's directory) and is ``length`` bytes long, payload and frame.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of global ``shape``, cut in ``chunks``."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object: ``length`` bytes of ``file`` from byte ``offset``, a ``torch.save`` archive."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """Content of a ``.metadata`` file, by name. ``warnings`` are oddities that do no harm."""

    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    warnings: tuple[Defect, ...] = field(default=())
