"""A storage without files: objects in memory, no descriptor, no device."""

from __future__ import annotations

from glmconv.basics.errors import StorageError
from glmconv.storage.errors import changed_object, too_short
from glmconv.storage.objects import OpenObject, Standing, StorageObject

NAME = "memory"


class MemoryObject:
    """An open object. ``open_now`` counts those of its storage."""

    def __init__(self, storage: MemoryStorage, wanted: StorageObject, data: bytes) -> None:
        self.object = wanted
        self.local_fd: int | None = None
        self.device: int | None = None
        self.sparse = False
        self.read_size = 12_345
        self._storage, self._data = storage, data
        storage.open_now += 1

    def read_into(self, view: memoryview, offset: int) -> None:
        got = self._data[offset : offset + len(view)]
        if len(got) < len(view):
            raise too_short(self.object, offset + len(got), len(view) - len(got))
        view[:] = got

    def close(self) -> None:
        self._storage.open_now -= 1


class MemoryStorage:
    """Objects by address, each with a number that grows whenever it is put again."""

    def __init__(self) -> None:
        self.open_now = 0
        self._held: dict[str, tuple[int, bytes]] = {}

    def put(self, address: str, data: bytes) -> StorageObject:
        """Put an object in, in place of an earlier one, and say its identity."""
        number = self._held.get(address, (0, b""))[0] + 1
        self._held[address] = number, data
        return StorageObject(address, len(data), (("revision", number),), "header", NAME)

    def examine(self, wanted: StorageObject) -> Standing:
        self._same(wanted)
        return Standing()

    def open(self, wanted: StorageObject) -> OpenObject:
        return MemoryObject(self, wanted, self._same(wanted))

    def _same(self, wanted: StorageObject) -> bytes:
        if wanted.address not in self._held:
            raise StorageError("is not there", where=wanted.address)
        number, data = self._held[wanted.address]
        if (("revision", number),) != wanted.version:
            raise changed_object(wanted, "is another revision than the planned one")
        return data
