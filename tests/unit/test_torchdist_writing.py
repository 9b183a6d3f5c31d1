"""A long pickle is written in pieces that are joined now and then: the bytes must not show it."""

from __future__ import annotations

import pytest

from glmconv.basics.dtypes import DType
from glmconv.formats.torchdist.entries import Chunk, ObjectEntry, TensorEntry
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.formats.torchdist.pickle import writing


def test_joining_pieces_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = tuple(Chunk((4 * i, 0), (4, 6), f"__0_{i}.distcp", 100 * i, 90) for i in range(5))
    tensors = {f"layer.{i}.weight": TensorEntry(DType.BF16, (20, 6), chunks) for i in range(30)}
    objects = {f"layer.{i}._extra_state/shard_0_1": ObjectEntry("__0_0.distcp", 0, 9) for i in range(9)}
    whole = metadata_bytes(tensors, objects)
    for pieces in (1, 7, 100):
        monkeypatch.setattr(writing, "MANY_PIECES", pieces)
        assert metadata_bytes(tensors, objects) == whole
