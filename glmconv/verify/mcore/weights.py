"""Weights of one Megatron stage, from a torch_dist checkpoint.

``NativeWeights`` lets megatron-core load a checkpoint of the dialect that it runs.
``RelaidWeights`` lays a checkpoint of another dialect out anew by the tables, in memory. Both
fill a stage and leave no other copy behind.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, Defect
from glmconv.source.source import Source
from glmconv.tables.expand import Part, megatron_layout, view2d
from glmconv.values.reader import Reader
from glmconv.verify.mcore.load import TorchDist
from glmconv.verify.mcore.stages import Stage


class Weights(Protocol):
    """A way to fill a stage."""

    def fill(self, stage: Stage) -> None:
        """Give every parameter and persistent buffer of ``stage`` its value, or raise DataError."""
        ...


class NativeWeights:
    """Megatron-core's own ``dist_checkpointing`` reads the unit directory ``unit``."""

    def __init__(self, unit: Path) -> None:
        self.checkpoint = TorchDist(unit)

    def fill(self, stage: Stage) -> None:
        """Read what the stage's ``sharded_state_dict`` names, and nothing else."""
        self.checkpoint.load_part(stage)


class RelaidWeights:
    """The tensors of ``source`` in the order and under the names of ``dialect``.

    ``without`` are keys to leave out, as if the checkpoint lacked them.
    """

    def __init__(self, source: Source, dialect: str, without: Container[str] = ()) -> None:
        self.source = source
        layout = megatron_layout(source.table, source.spec, dialect, stacked=False)
        self.parts = {(part.stored, part.index): part for part in layout.parts if part.stored not in without}

    def fill(self, stage: Stage) -> None:
        """Assemble each of the stage's tensors from the pieces of Hugging Face tensors."""
        tensors = stage.tensors()
        places = stage.places()
        absent = [
            Defect("missing", "the model asks for it", places[name].key if name in places else name)
            for name in tensors
            if name not in places or (places[name].key, places[name].index) not in self.parts
        ]
        if absent:
            raise DataError(
                f"{len(absent)} tensors that the model needs are not in the checkpoint",
                where=str(self.source.path),
                defects=absent,
            )
        with Reader(self.source.files) as reader, torch.no_grad():
            for name, tensor in tensors.items():
                place = places[name]
                self._fill(tensor, self.parts[place.key, place.index], reader)

    def _fill(self, tensor: Tensor, part: Part, reader: Reader) -> None:
        if tuple(tensor.shape) != part.shape:
            raise DataError(
                f"has shape {list(part.shape)}, the model asks for {list(tensor.shape)}", where=part.stored
            )
        self._assemble(tensor, part, reader)

    def assembled(self, part: Part, reader: Reader) -> Tensor:
        """One part in fp32, on the CPU."""
        made = torch.empty(part.shape, dtype=torch.float32)
        self._assemble(made, part, reader)
        return made

    def _assemble(self, tensor: Tensor, part: Part, reader: Reader) -> None:
        view = tensor.view(view2d(part.shape))
        for held, boxes in part.slots:
            located = self.source.tensors[held.name]
            values = _as_torch(reader.whole(located), located.dtype)
            for box in boxes:
                view[box.part_row : box.part_row + box.rows, box.part_col : box.part_col + box.cols] = values[
                    box.row : box.row + box.rows, box.col : box.col + box.cols
                ]


class DiskState(Mapping[str, Tensor]):
    """All tensors of a relaid checkpoint by their keys on disk (keys per layer, experts stacked).

    A tensor is assembled in fp32 when it is asked for, and forgotten with the next :meth:`forget`.
    """

    def __init__(self, weights: RelaidWeights) -> None:
        self.weights = weights
        self.groups: dict[str, list[Part]] = {}
        for part in weights.parts.values():
            self.groups.setdefault(part.stored, []).append(part)
        self._read: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._read:
            parts = sorted(self.groups[key], key=lambda part: part.index)
            with Reader(self.weights.source.files) as reader:
                made = [self.weights.assembled(part, reader) for part in parts]
            self._read[key] = torch.stack(made) if parts[0].index else made[0]
        return self._read[key]

    def forget(self) -> None:
        """Let go of what was read."""
        self._read.clear()


def _as_torch(bits: Any, dtype: DType) -> Tensor:
    """Stored bits as a torch tensor of their dtype, not copied."""
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1"))
    return signed.view(getattr(torch, dtype.torch_name))
