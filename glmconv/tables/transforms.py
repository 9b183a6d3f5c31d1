"""Transforms: nouns that name a memory layout, each a movement along one axis.

A transform says how the rows (or columns) of named Hugging Face tensors, its slots, lie in one
stored tensor. It is written once, as spans; forward, inverse, shapes and the lift to adapters are
derived from the spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

from glmconv.basics.errors import DataError
from glmconv.tables.hf import Hf
from glmconv.tables.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` indices of a slot that lie together in the stored tensor, ``repeat`` times.

    Repetition ``i`` maps ``slot_start + i * slot_step`` to ``stored_start + i * stored_step``.
    """

    slot: str
    slot_start: int
    stored_start: int
    length: int
    repeat: int = 1
    slot_step: int = 0
    stored_step: int = 0

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(slot index, stored index, length) of every repetition."""
        for i in range(self.repeat):
            yield self.slot_start + i * self.slot_step, self.stored_start + i * self.stored_step, self.length


@runtime_checkable
class Transform(Protocol):
    """What every transform offers.

    ``axis``: 0 moves rows, 1 columns. ``separate``: each slot is a chunk of its own on disk.
    ``pads``: the stored tensor may have more rows than the slot; those are zero.
    """

    axis: ClassVar[int]
    separate: ClassVar[bool]
    pads: ClassVar[bool]

    def slots(self) -> dict[str, Hf]:
        """The Hugging Face tensors by slot name."""
        ...

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        """Where the indices of each slot (``sizes`` along ``axis``) lie in the stored tensor."""
        ...


class _Slotted:
    """Slots are the dataclass fields that hold an :class:`Hf`."""

    axis: ClassVar[int] = 0
    separate: ClassVar[bool] = False
    pads: ClassVar[bool] = False

    def slots(self) -> dict[str, Hf]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if isinstance(value, Hf)}


@dataclass(frozen=True)
class Same(_Slotted):
    """The same tensor under another name."""

    tensor: Hf

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        return (Span("tensor", 0, 0, sizes["tensor"]),)


@dataclass(frozen=True)
class PadVocab(_Slotted):
    """An embedding or head; the stored tensor may be padded with zero rows at its end.

    Megatron-Core tolerates another number of rows at load for these two tensors only.
    """

    tensor: Hf
    pads: ClassVar[bool] = True

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        return (Span("tensor", 0, 0, sizes["tensor"]),)


@dataclass(frozen=True)
class GateUp(_Slotted):
    """``linear_fc1``: all gate rows, then all up rows. ``[F, H] + [F, H] -> [2F, H]``."""

    gate: Hf
    up: Hf
    separate: ClassVar[bool] = True

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        return (Span("gate", 0, 0, sizes["gate"]), Span("up", 0, sizes["gate"], sizes["up"]))


@dataclass(frozen=True)
class GroupedQKV(_Slotted):
    """``linear_qkv``: for each query group its q heads, then its k head, then its v head.

    ``[G*r*D, H] + [G*D, H] + [G*D, H] -> [G*(r+2)*D, H]`` with ``r = num_heads / num_groups``.
    Holds for the bias too, on one axis.
    """

    q: Hf
    k: Hf
    v: Hf

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        head, groups = spec.head_dim, spec.num_groups
        q_rows = spec.num_heads // groups * head
        step = q_rows + 2 * head
        return (
            Span("q", 0, 0, q_rows, groups, q_rows, step),
            Span("k", 0, q_rows, head, groups, head, step),
            Span("v", 0, q_rows + head, head, groups, head, step),
        )


@dataclass(frozen=True)
class RopeHalfSwap(_Slotted):
    """Indexer channels, each head: ``[rope | rest]`` in Hugging Face, ``[rest | rope]`` stored.

    Needed by runtimes that keep the rotary channels last. A swap of equal halves where
    ``index_head_dim = 2 * qk_rope_head_dim``; right for other sizes too.
    """

    tensor: Hf

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        if spec.dsa is None or spec.mla is None:
            raise DataError("RopeHalfSwap needs an indexer and MLA sizes", where=self.tensor.name)
        head, rope = spec.dsa.head_dim, spec.mla.qk_rope_head_dim
        rest = head - rope
        heads = sizes["tensor"] // head
        return (
            Span("tensor", 0, rest, rope, heads, head, head),
            Span("tensor", rope, 0, rest, heads, head, head),
        )


@dataclass(frozen=True)
class ColumnHalfSwap(_Slotted):
    """The two halves of the columns change places: ``[a | b] -> [b | a]``."""

    tensor: Hf
    axis: ClassVar[int] = 1

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        half = sizes["tensor"] // 2
        return (Span("tensor", 0, half, half), Span("tensor", half, 0, half))


def stored_size(spans: tuple[Span, ...]) -> int:
    """Extent of the stored tensor along the transform's axis."""
    return sum(span.length * span.repeat for span in spans)


def lift(transform: Transform) -> tuple[str, int]:
    """Which LoRA factor moves with the weight and along which of its axes.

    A weight ``[out, in]`` carries ``lora_B [out, r] @ lora_A [r, in]``: a movement of its rows
    moves the rows of ``lora_B``, a movement of its columns the columns of ``lora_A``; the other
    factor stays (and must be the same for all slots).
    """
    return ("lora_B", 0) if transform.axis == 0 else ("lora_A", 1)
