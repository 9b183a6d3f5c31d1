"""Objects of any storage, examined and held open: the one way in which bytes of a source are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from glmconv.storage.local import LocalStorage
from glmconv.storage.objects import OpenObject, Standing, Storage, StorageObject

OPEN_OBJECTS = 32
"""Objects that one worker keeps open: far under the usual limit of 1,024 files."""

STORAGES: dict[str, Storage] = {"local": LocalStorage()}
"""Every storage by the name that its objects carry; a new one adds itself here."""


def examine_all(objects: Sequence[StorageObject]) -> list[Standing]:
    """Look at every object again. DataError when one changed, StorageError when one is gone."""
    return [STORAGES[one.storage].examine(one) for one in objects]


class OpenObjects:
    """The objects of one worker: opened on first use, the least recently used closed beyond a bound."""

    def __init__(self, objects: Sequence[StorageObject], limit: int = OPEN_OBJECTS) -> None:
        self._objects = objects
        self._limit = limit
        self._open: OrderedDict[int, OpenObject] = OrderedDict()

    def get(self, index: int) -> OpenObject:
        """The open object ``index``; DataError when it is not the one that was planned."""
        found = self._open.get(index)
        if found is not None:
            self._open.move_to_end(index)
            return found
        while len(self._open) >= self._limit:
            self._open.popitem(last=False)[1].close()
        wanted = self._objects[index]
        opened = self._open[index] = STORAGES[wanted.storage].open(wanted)
        return opened

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
