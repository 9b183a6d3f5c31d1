"""A Hugging Face tensor, as tables name it."""

from __future__ import annotations

from dataclasses import dataclass

from glmconv.basics.dtypes import DType
from glmconv.tables.dims import Dim


@dataclass(frozen=True, slots=True, init=False)
class Hf:
    """A tensor under its hub name, with the sizes of its axes. ``lock``: kept in this dtype."""

    name: str
    dims: tuple[Dim, ...]
    lock: DType | None

    def __init__(self, name: str, *dims: Dim, lock: DType | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "lock", lock)
