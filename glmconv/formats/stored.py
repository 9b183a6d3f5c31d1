"""Tensors as they are stored: what every format's headers come down to."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from glmconv.basics.dtypes import DType


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a stored tensor: its data starts at byte ``offset`` of source file ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    offset: int


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint under the name that the checkpoint uses."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: list[StoredChunk]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize
