"""The checkpoint under check, and the names that its table gives to features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from glmconv.source.source import Source
from glmconv.tables.expand import Layout, hf_layout, megatron_layout
from glmconv.tables.rules import Axis, Table
from glmconv.tables.spec import ModelSpec

INDEXER = ".self_attn.indexer."
"""What the Hugging Face names of all indexer tensors hold."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, or the block inside an MTP layer; ``number`` is that of Hugging Face."""

    number: int
    prefix: str
    is_mtp: bool


def _hf_number(axis: Axis, i: int, spec: ModelSpec) -> int:
    return spec.num_layers + i if axis.hf_after_layers else i


def layers(table: Table, spec: ModelSpec) -> Iterator[Layer]:
    """All layers of a model: decoder layers, then MTP layers."""
    for i in range(spec.num_layers):
        number = _hf_number(table.layer, i, spec)
        yield Layer(number, table.layer.hf.replace("{n}", str(number)), False)
    for i in range(spec.num_mtp):
        number = _hf_number(table.mtp_block, i, spec)
        yield Layer(number, table.mtp_block.hf.replace("{n}", str(number)), True)


def mtp_prefix(table: Table, spec: ModelSpec, kind: str, i: int) -> str:
    """Prefix of all tensors of MTP layer ``i`` as a checkpoint of this kind names them."""
    if kind == "megatron":
        return table.mtp.mcore.replace("{n}", str(i)) + "."
    return table.mtp.hf.replace("{n}", str(_hf_number(table.mtp, i, spec))) + "."


def templates(table: Table, within: str) -> list[str]:
    """Hugging Face names of the table that hold ``within``, their holes unfilled."""
    return [hf.name for rule in table.rules for hf in rule.via.slots().values() if within in hf.name]


def vocabulary_tensors(table: Table) -> list[str]:
    """Names of the embedding and the head: the tensors that may be padded."""
    return [hf.name for rule in table.rules if rule.via.pads for hf in rule.via.slots().values()]


class Subject:
    """An opened checkpoint; tells where a tensor lies for messages."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def layers(self) -> list[Layer]:
        return list(layers(self.source.table, self.source.spec))

    @cached_property
    def skeleton(self) -> Layout:
        """The checkpoint's layout with one expert a layer: quick to expand, for all other tensors."""
        source = self.source
        moe = source.spec.moe
        spec = source.spec if moe is None else replace(source.spec, moe=replace(moe, num_experts=1))
        if source.kind == "megatron":
            return megatron_layout(source.table, spec, source.layout, source.stacked)
        return hf_layout(source.table, spec)

    @cached_property
    def _layout(self) -> Layout:
        source = self.source
        if source.kind == "megatron":
            return megatron_layout(source.table, source.spec, source.layout, source.stacked)
        return hf_layout(source.table, source.spec, stacked_experts=source.layout == "hf-stacked")

    def file(self, name: str) -> str:
        """Base name of the file that holds (the first piece of) a tensor."""
        located = self.source.tensors.get(name)
        if located is None or not located.pieces:
            return ""
        return Path(self.source.files[located.pieces[0].file].address).name

    def place(self, name: str) -> str:
        """A tensor's name with its file and, where that is another, its name in the file."""
        home = self._layout.home.get(name)
        stored = f" as {home.stored}" if home is not None and home.stored != name else ""
        file = self.file(name)
        return f"{name} (in {file}{stored})" if file else name
