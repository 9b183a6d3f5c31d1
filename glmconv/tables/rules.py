"""The vocabulary of a table: tensors, rules, conditions, axes.

A table is read once, expanded into exact names, and used in both directions. Names hold named
holes: ``{layer}`` (a decoder layer or the block inside an MTP layer), ``{mtp}`` (the MTP layer
around that block) and ``{expert}``. A stored name may end in ``[{expert}]``: the tensor is one
element of a larger one with a leading axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glmconv.tables.spec import ModelSpec
from glmconv.tables.transforms import Transform

DIALECTS = ("mcore", "mcore-0.18", "slime", "miles")
"""How tensors of a torch_dist checkpoint are named and ordered."""

BASE_DIALECT = "mcore"
"""The dialect that tables are written in; the others are overlays."""


@dataclass(frozen=True, slots=True)
class When:
    """A condition on a model and a layer; an MTP block counts as layer ``num_layers + i``."""

    name: str
    holds: Callable[[ModelSpec, int], bool]

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Rule:
    """One stored tensor (``stored``) and the Hugging Face tensors that it consists of (``via``)."""

    stored: str
    via: Transform
    when: tuple[When, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """A Hugging Face tensor that no other layout holds; ``optional`` by nature."""

    name: str
    reason: str
    when: tuple[When, ...] = ()
    warn: bool = False


@dataclass(frozen=True, slots=True)
class Tied:
    """A Hugging Face tensor that, where a checkpoint has it, holds the same bytes as ``to``."""

    name: str
    to: str
    when: tuple[When, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of layers with a numbering for each layout; ``{n}`` is the number.

    ``hf_after_layers``: the Hugging Face number of element ``i`` is ``num_layers + i``.
    """

    hf: str
    mcore: str
    hf_after_layers: bool = False


LAYER = Axis(hf="model.layers.{n}", mcore="decoder.layers.{n}")
MTP = Axis(hf="model.layers.{n}", mcore="mtp.layers.{n}", hf_after_layers=True)
MTP_BLOCK = Axis(hf="model.layers.{n}", mcore="mtp.layers.{n}.transformer_layer", hf_after_layers=True)


@dataclass(frozen=True, slots=True)
class Table:
    """All that is known about one family's tensors.

    ``overlays[dialect]`` and ``hf_stacked`` replace those rules whose Hugging Face tensors they
    share. ``stacked_layers`` names the dialects that store the decoder's layers as one tensor
    with a leading axis (a property of how trainers build the model: ``torch_dist.md`` section 2).
    """

    model_type: str
    rules: tuple[Rule, ...]
    overlays: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    hf_stacked: tuple[Rule, ...] = ()
    drops: tuple[Drop, ...] = ()
    tied: tuple[Tied, ...] = ()
    stacked_layers: tuple[str, ...] = ()
    layer: Axis = LAYER
    mtp: Axis = MTP
    mtp_block: Axis = MTP_BLOCK


def _router_bias(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe(layer) and spec.moe is not None and spec.moe.router_bias


def _shared_experts(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe(layer) and spec.moe is not None and spec.moe.shared_ffn_size > 0


def _interleaved(spec: ModelSpec, layer: int) -> bool:
    return spec.has_indexer(layer) and spec.dsa is not None and spec.dsa.rope_interleave


def _half_split(spec: ModelSpec, layer: int) -> bool:
    return spec.has_indexer(layer) and not _interleaved(spec, layer)


DENSE = When("dense layer", lambda spec, layer: not spec.is_moe(layer))
MOE = When("MoE layer", lambda spec, layer: spec.is_moe(layer))
SHARED_EXPERTS = When("MoE layer with shared experts", _shared_experts)
ROUTER_BIAS = When("MoE layer with router bias", _router_bias)
INDEXER = When("layer owns an indexer", lambda spec, layer: spec.has_indexer(layer))
SHARES_INDEX = When("layer shares an index", lambda spec, layer: not spec.has_indexer(layer))
INTERLEAVED_INDEXER = When("indexer rope interleaved", _interleaved)
HALF_SPLIT_INDEXER = When("indexer rope half-split", _half_split)
QK_NORM = When("qk norm", lambda spec, layer: spec.qk_norm)
QKV_BIAS = When("qkv bias", lambda spec, layer: spec.qkv_bias)
UNTIED = When("untied head", lambda spec, layer: not spec.tied)
TIED = When("tied head", lambda spec, layer: spec.tied)
