"""Mutants of the tables: each breaks one rule, the way a person writing a table would.

A mutant changes the expanded layout that a conversion writes; names and shapes stay right wherever
the mistake allows it. Tests convert with the mutant and ask an oracle that knows no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

import glmconv.plan.planner
from glmconv.tables.expand import Layout, megatron_layout
from glmconv.tables.hf import Hf
from glmconv.tables.rules import Rule, Table
from glmconv.tables.spec import ModelSpec
from glmconv.tables.transforms import ColumnHalfSwap, GateUp, GroupedQKV, RopeHalfSwap, Same, Span, Transform


@dataclass(frozen=True)
class FlatQKV(GroupedQKV):
    """All q rows, then all k rows, then all v rows."""

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        return (
            Span("q", 0, 0, sizes["q"]),
            Span("k", 0, sizes["q"], sizes["k"]),
            Span("v", 0, sizes["q"] + sizes["k"], sizes["v"]),
        )


@dataclass(frozen=True)
class InterleavedGateUp(GateUp):
    """gate row, up row, gate row, up row …"""

    separate: ClassVar[bool] = False

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        return (Span("gate", 0, 0, 1, sizes["gate"], 1, 2), Span("up", 0, 1, 1, sizes["up"], 1, 2))


@dataclass(frozen=True)
class RowHalfSwap(Same):
    """The halves of all rows change places, heads ignored."""

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        half = sizes["tensor"] // 2
        rest = sizes["tensor"] - half
        return (Span("tensor", 0, rest, half), Span("tensor", half, 0, rest))


Edit = Callable[[Transform], Transform]


@dataclass(frozen=True)
class Mutant:
    """``rules`` edits rows whose stored name ends in a suffix; ``layout`` edits the expanded parts."""

    name: str
    rules: Mapping[str, Edit] | None = None
    layout: Callable[[Layout], None] | None = None
    spec: Callable[[ModelSpec], ModelSpec] | None = None
    models: tuple[str, ...] = ("glm-5.2", "glm-4.5", "qwen3", "qwen3-moe")
    dialects: tuple[str, ...] = ("mcore",)


def _qkv(via: Transform, **slots: str) -> Transform:
    old = via.slots()
    return GroupedQKV(**{new: old[was] for new, was in slots.items()})


def _rename(suffix: str, other: str) -> Edit:
    """The row takes another Hugging Face tensor of the same shape."""

    def edit(via: Transform) -> Transform:
        hf = via.slots()["tensor"]
        return Same(Hf(hf.name.replace(suffix, other), *hf.dims, lock=hf.lock))

    return edit


def _same(via: Transform) -> Transform:
    return Same(via.slots()["tensor"])


def _gate_up(via: Transform) -> Transform:
    slots = via.slots()
    return GateUp(gate=slots["up"], up=slots["gate"])


def _reverse_experts(layout: Layout) -> None:
    for part in layout.parts:
        axes = layout.axes[part.stored]
        if part.index and ".experts." in part.stored:
            part.index = (*part.index[:-1], axes[-1] - 1 - part.index[-1])


def _shift_experts(layout: Layout) -> None:
    for part in layout.parts:
        axes = layout.axes[part.stored]
        if part.index and ".experts." in part.stored:
            part.index = (*part.index[:-1], (part.index[-1] + 1) % axes[-1])


def _swap_layers(layout: Layout) -> None:
    """Two alike layers in each other's place."""
    first, second = ("decoder.layers.2.", "decoder.layers.3.")
    for part in layout.parts:
        if layout.stacked and part.stored.startswith("decoder.layers.") and part.index[0] in (0, 1):
            part.index = (1 - part.index[0], *part.index[1:])
        elif part.stored.startswith(first) and part.stored.replace(first, second) in layout.axes:
            part.stored = part.stored.replace(first, second)
        elif part.stored.startswith(second) and part.stored.replace(second, first) in layout.axes:
            part.stored = part.stored.replace(second, first)


def _no_mtp(spec: ModelSpec) -> ModelSpec:
    return replace(spec, num_mtp=0)


GQA = ("glm-4.5", "qwen3", "qwen3-moe")
MOE = ("glm-5.2", "glm-4.5", "qwen3-moe")
GLM = ("glm-5.2", "glm-4.5")
DSA = ("glm-5.2",)
SWAPPING = ("mcore-0.18", "slime", "miles")

MUTANTS = (
    Mutant(
        "q and k swapped within the group",
        {"linear_qkv.weight": lambda v: _Reordered.of(v, "kqv")},
        models=GQA,
    ),
    Mutant("k and v swapped", {"linear_qkv.weight": lambda v: _qkv(v, q="q", k="v", v="k")}, models=GQA),
    Mutant(
        "bias k and v swapped",
        {"linear_qkv.bias": lambda v: _qkv(v, q="q", k="v", v="k")},
        models=("glm-4.5",),
    ),
    Mutant("QKV not grouped", {"linear_qkv.weight": lambda v: FlatQKV(**v.slots())}, models=GQA),
    Mutant("bias not grouped", {"linear_qkv.bias": lambda v: FlatQKV(**v.slots())}, models=("glm-4.5",)),
    Mutant(
        "q and k norm swapped",
        {
            "q_layernorm.weight": _rename("q_norm", "k_norm"),
            "k_layernorm.weight": _rename("k_norm", "q_norm"),
        },
        models=GQA,
    ),
    Mutant(
        "dense gate and up swapped",
        {"layer}.mlp.linear_fc1.weight": _gate_up},
        models=("glm-5.2", "glm-4.5", "qwen3"),
    ),
    Mutant("expert gate and up swapped", {"experts.linear_fc1.weight[{expert}]": _gate_up}, models=MOE),
    Mutant("shared gate and up swapped", {"shared_experts.linear_fc1.weight": _gate_up}, models=GLM),
    Mutant(
        "gate and up interleaved",
        {"experts.linear_fc1.weight[{expert}]": lambda v: InterleavedGateUp(**v.slots())},
        models=MOE,
    ),
    Mutant("experts in reverse order", layout=_reverse_experts, models=MOE),
    Mutant("experts shifted by one", layout=_shift_experts, models=MOE),
    Mutant("two layers exchanged", layout=_swap_layers),
    Mutant(
        "input and post norm exchanged (MoE)",
        {
            "pre_mlp_layernorm.weight": _rename("post_attention_layernorm", "input_layernorm"),
            "linear_qkv.layer_norm_weight": _rename("input_layernorm", "post_attention_layernorm"),
            "}.input_layernorm.weight": _rename("input_layernorm", "post_attention_layernorm"),
            "linear_fc1.layer_norm_weight": _rename("post_attention_layernorm", "input_layernorm"),
        },
    ),
    Mutant(
        "enorm and hnorm exchanged",
        {
            "enorm.weight": _rename("enorm", "hnorm"),
            "hnorm.weight": _rename("hnorm", "enorm"),
        },
        models=GLM,
    ),
    Mutant(
        "eh_proj halves exchanged",
        {"eh_proj.weight": lambda v: ColumnHalfSwap(v.slots()["tensor"])},
        models=GLM,
    ),
    Mutant("MTP dropped", spec=_no_mtp, models=GLM),
    Mutant(
        "final norm of MTP taken from enorm",
        {
            "{mtp}.final_layernorm.weight": _rename("shared_head.norm", "enorm"),
            "enorm.weight": _rename("enorm", "shared_head.norm"),
        },
        models=GLM,
    ),
    Mutant(
        "embedding and head exchanged",
        {
            "word_embeddings.weight": _rename("model.embed_tokens", "lm_head"),
            "output_layer.weight": _rename("lm_head", "model.embed_tokens"),
        },
        models=GLM,
    ),
    Mutant(
        "indexer not swapped",
        {
            "wq_b.weight": _same,
            "wk.weight": _same,
            "k_norm.weight": _same,
            "k_norm.bias": _same,
        },
        models=DSA,
        dialects=SWAPPING,
    ),
    Mutant("indexer k_norm bias not swapped", {"k_norm.bias": _same}, models=DSA, dialects=SWAPPING),
    Mutant(
        "indexer swapped where it must not be",
        {
            "wq_b.weight": lambda v: RopeHalfSwap(v.slots()["tensor"]),
            "wk.weight": lambda v: RopeHalfSwap(v.slots()["tensor"]),
        },
        models=DSA,
        dialects=("mcore",),
    ),
    Mutant(
        "indexer halves swapped over all heads",
        {"wq_b.weight": lambda v: RowHalfSwap(v.slots()["tensor"])},
        models=DSA,
        dialects=SWAPPING,
    ),
    Mutant(
        "weights_proj swapped too",
        {"weights_proj.weight": lambda v: RowHalfSwap(v.slots()["tensor"])},
        models=DSA,
        dialects=("mcore", *SWAPPING),
    ),
)


@dataclass(frozen=True)
class _Reordered(GroupedQKV):
    """q, k, v of a group in another order."""

    order: str = "qkv"

    @classmethod
    def of(cls, via: Transform, order: str) -> _Reordered:
        return cls(**via.slots(), order=order)

    def spans(self, sizes: Mapping[str, int], spec: ModelSpec) -> tuple[Span, ...]:
        head, groups = spec.head_dim, spec.num_groups
        rows = {"q": spec.num_heads // groups * head, "k": head, "v": head}
        spans, at = [], 0
        for slot in self.order:
            spans.append(Span(slot, 0, at, rows[slot], groups, rows[slot], sum(rows.values())))
            at += rows[slot]
        return tuple(spans)


def _edited(rules: tuple[Rule, ...], edits: Mapping[str, Edit]) -> tuple[Rule, ...]:
    def one(rule: Rule) -> Rule:
        for suffix, edit in edits.items():
            if rule.stored.endswith(suffix):
                return replace(rule, via=edit(rule.via))
        return rule

    return tuple(one(rule) for rule in rules)


def _mutate(table: Table, mutant: Mutant) -> Table:
    if mutant.rules is None:
        return table
    overlays = {name: _edited(rules, mutant.rules) for name, rules in table.overlays.items()}
    mutated = replace(table, rules=_edited(table.rules, mutant.rules), overlays=overlays)
    if (mutated.rules, mutated.overlays) == (table.rules, table.overlays):
        raise AssertionError(f"mutant {mutant.name!r} changes nothing in {table.model_type}")
    return mutated


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While this is open, conversions to Megatron are planned with the mutant's layout."""

    def layout(table: Table, spec: ModelSpec, dialect: str, stacked: bool | None = None) -> Layout:
        if mutant.spec is not None:
            spec = mutant.spec(spec)
        made = megatron_layout(_mutate(table, mutant), spec, dialect, stacked)
        if mutant.layout is not None:
            mutant.layout(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glmconv.plan.planner, "megatron_layout", layout)
        yield
