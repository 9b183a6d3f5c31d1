"""Reading one layer of a torch_dist that stores all layers as one tensor.

``dist_checkpointing.load`` expects the processes of a job to ask for a whole tensor between
them, so one process cannot ask it for one layer. torch's own distributed checkpoint reader, which
does megatron-core's reading, can: a planner says which rectangles to read and where they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from glmconv.basics.errors import DataError


@dataclass(frozen=True, slots=True)
class Slice:
    """``tensor`` is filled from the stored tensor ``key``, from ``offsets`` on; ranks are equal."""

    key: str
    offsets: tuple[int, ...]
    tensor: Tensor


def read_slices(where: str | Path, wanted: Sequence[Slice]) -> None:
    """Fill every slice; values are cast to the dtype of its tensor. Raises DataError for an absent key."""
    if wanted:
        load({}, storage_reader=FileSystemReader(where), planner=_Planner(where, wanted), no_dist=True)


class _Planner(DefaultLoadPlanner):
    """Reads slices; each is known to the reader by its number."""

    def __init__(self, where: str | Path, wanted: Sequence[Slice]) -> None:
        super().__init__()
        self.where = where
        self.wanted = {str(number): one for number, one in enumerate(wanted)}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, one in self.wanted.items():
            stored: Any = self.metadata.state_dict_metadata.get(one.key) if self.metadata else None
            if not isinstance(stored, TensorStorageMetadata):
                raise DataError("is not in the checkpoint", where=f"{self.where}: {one.key}")
            chunk = ChunkStorageMetadata(offsets=torch.Size(one.offsets), sizes=one.tensor.shape)
            for item in create_read_items_for_chunk_list(one.key, stored, [chunk]):
                # What is read is found under the key, what it is read into under the number.
                index = type(item.dest_index)(number, item.dest_index.offset, item.dest_index.index)
                items.append(
                    ReadItem(
                        type=item.type,
                        dest_index=index,
                        dest_offsets=item.dest_offsets,
                        storage_index=item.storage_index,
                        storage_offsets=item.storage_offsets,
                        lengths=item.lengths,
                    )
                )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.wanted[read_item.dest_index.fqn].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the tensor was read in place."""
