"""The seam between bytes and where they lie: objects with an identity, opened and read by ranges.

A plan names objects of a storage and assumes nothing else of them. What only a local filesystem can
do (clone, tell holes, copy inside the kernel) is offered by objects that have a ``local_fd``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StorageObject:
    """A source of bytes, and what proves later that it is still the one that was planned.

    ``address`` is absolute, links resolved, and means something to ``storage`` only. ``version``
    are what that storage tells versions of one object apart by, each with its name.
    ``header_digest`` covers a safetensors header or a ``.metadata`` file.
    """

    address: str
    size: int
    version: tuple[tuple[str, int | str], ...] = ()
    header_digest: str = ""
    storage: str = "local"

    @property
    def identity(self) -> list[str | int]:
        """What tells this object from every other, as plain data."""
        return [self.address, self.size, *(value for _, value in self.version), self.header_digest]

    @property
    def named_identity(self) -> dict[str, str | int]:
        """:attr:`identity` with a name for each value."""
        return dict(zip(("path", "size", *dict(self.version), "header"), self.identity, strict=True))


@dataclass(frozen=True, slots=True)
class Standing:
    """How an object lies in its storage now.

    ``device`` is the local filesystem's number, None where no kernel call reaches the bytes;
    ``holes`` are bytes that the object has and its storage does not keep.
    """

    device: int | None = None
    holes: int = 0


class OpenObject(Protocol):
    """An object opened for reading, shown at that moment to be the one that was planned.

    ``local_fd`` is a descriptor of the kernel's, where there is one. ``sparse``: it may have holes,
    which ``lseek`` on ``local_fd`` finds. ``device`` as in :class:`Standing`. ``read_size`` is how
    many bytes a read should ask for at most: a local file's is small enough for a cache, a remote
    one's large enough to be worth the way.
    """

    object: StorageObject
    local_fd: int | None
    device: int | None
    sparse: bool
    read_size: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset``. DataError when it ends early, StorageError on I/O errors."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Where objects lie."""

    def examine(self, wanted: StorageObject) -> Standing:
        """DataError when the object is not the one that was planned, StorageError when it is gone."""

    def open(self, wanted: StorageObject) -> OpenObject:
        """Open an object; errors as :meth:`examine`."""
