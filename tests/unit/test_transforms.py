"""Laws of transforms: a movement loses nothing, its inverse undoes it, an adapter moves with its weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from glmconv.tables.dims import HIDDEN
from glmconv.tables.hf import Hf
from glmconv.tables.spec import Dsa, Mla, ModelSpec, Rope
from glmconv.tables.transforms import (
    ColumnHalfSwap,
    GateUp,
    GroupedQKV,
    PadVocab,
    RopeHalfSwap,
    Same,
    Transform,
    lift,
    stored_size,
)

SPEC = ModelSpec(
    model_type="test",
    num_layers=1,
    hidden_size=8,
    num_heads=4,
    num_groups=2,
    head_dim=4,
    ffn_size=16,
    vocab_size=32,
    norm_eps=1e-5,
    tied=False,
    rope=Rope(1e4),
    max_positions=64,
)
ANY = Hf("x", HIDDEN, HIDDEN)


def with_indexer(head_dim: int, rope: int) -> ModelSpec:
    return replace(
        SPEC,
        mla=Mla(4, 4, 4, rope, 4),
        dsa=Dsa(2, head_dim, 4, (True,), 1, 2, True),
    )


Case = tuple[Transform, ModelSpec, dict[str, int], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A transform, a model that it suits, the slots' sizes along its axis, and the other axis' size."""
    small = st.integers(1, 6)
    kind = draw(st.sampled_from(["same", "pad", "gate", "qkv", "swap", "columns"]))
    other = draw(small)
    if kind in ("same", "pad"):
        via: Transform = Same(ANY) if kind == "same" else PadVocab(ANY)
        return via, SPEC, {"tensor": draw(small)}, other
    if kind == "gate":
        return GateUp(ANY, ANY), SPEC, {"gate": draw(small), "up": draw(small)}, other
    if kind == "columns":
        return ColumnHalfSwap(ANY), SPEC, {"tensor": 2 * draw(small)}, other
    if kind == "qkv":
        groups, ratio, head = draw(small), draw(small), draw(small)
        spec = replace(SPEC, num_heads=groups * ratio, num_groups=groups, head_dim=head)
        sizes = {"q": groups * ratio * head, "k": groups * head, "v": groups * head}
        return GroupedQKV(ANY, ANY, ANY), spec, sizes, other
    rope, rest, heads = draw(small), draw(small), draw(small)
    return RopeHalfSwap(ANY), with_indexer(rope + rest, rope), {"tensor": heads * (rope + rest)}, other


def forward(case: Case, slots: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    via, spec, sizes, other = case
    spans = via.spans(sizes, spec)
    shape = (stored_size(spans), other) if via.axis == 0 else (other, stored_size(spans))
    stored = np.full(shape, -1, dtype=np.int64)
    for span in spans:
        for start, to, length in span.each():
            if via.axis == 0:
                stored[to : to + length] = slots[span.slot][start : start + length]
            else:
                stored[:, to : to + length] = slots[span.slot][:, start : start + length]
    return stored


def backward(case: Case, stored: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    via, spec, sizes, other = case
    slots = {
        slot: np.full((n, other) if via.axis == 0 else (other, n), -1, dtype=np.int64)
        for slot, n in sizes.items()
    }
    for span in via.spans(sizes, spec):
        for start, to, length in span.each():
            if via.axis == 0:
                slots[span.slot][start : start + length] = stored[to : to + length]
            else:
                slots[span.slot][:, start : start + length] = stored[:, to : to + length]
    return slots


def numbered(case: Case) -> dict[str, NDArray[np.int64]]:
    via, _, sizes, other = case
    slots, at = {}, 0
    for slot, n in sizes.items():
        shape = (n, other) if via.axis == 0 else (other, n)
        slots[slot] = np.arange(at, at + n * other, dtype=np.int64).reshape(shape)
        at += n * other
    return slots


@given(cases())
def test_every_element_lands_exactly_once(case: Case) -> None:
    slots = numbered(case)
    stored = forward(case, slots)
    assert sorted(stored.ravel()) == list(range(sum(s.size for s in slots.values())))


@given(cases())
def test_inverse_after_forward_is_the_identity(case: Case) -> None:
    slots = numbered(case)
    back = backward(case, forward(case, slots))
    assert all((back[slot] == slots[slot]).all() for slot in slots)


@given(cases(), st.integers(1, 3))
def test_an_adapter_moves_as_its_weight_moves(case: Case, rank: int) -> None:
    """``moved(B @ A) == moved(B) @ A`` for rows and ``B @ moved(A)`` for columns."""
    via, spec, sizes, other = case
    factor, axis = lift(via)
    assert (factor, axis) == (("lora_B", 0) if via.axis == 0 else ("lora_A", 1))
    random = np.random.default_rng(0)
    if factor == "lora_B":
        shared = random.integers(-5, 5, (rank, other))
        moving = {slot: random.integers(-5, 5, (n, rank)) for slot, n in sizes.items()}
        weights = {slot: b @ shared for slot, b in moving.items()}
        lifted = forward((via, spec, sizes, rank), moving) @ shared
    else:
        shared = random.integers(-5, 5, (other, rank))
        moving = {slot: random.integers(-5, 5, (rank, n)) for slot, n in sizes.items()}
        weights = {slot: shared @ a for slot, a in moving.items()}
        lifted = shared @ forward((via, spec, sizes, rank), moving)
    assert (forward(case, weights) == lifted).all()


def test_grouped_qkv_interleaves_heads_by_group() -> None:
    """Two groups of two q heads, head_dim 1: q0 q1 k0 v0 q2 q3 k1 v1."""
    spec = replace(SPEC, num_heads=4, num_groups=2, head_dim=1)
    case = (GroupedQKV(ANY, ANY, ANY), spec, {"q": 4, "k": 2, "v": 2}, 1)
    stored = forward(
        case, {"q": np.array([[0], [1], [2], [3]]), "k": np.array([[10], [11]]), "v": np.array([[20], [21]])}
    )
    assert stored.ravel().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_rope_half_swap_puts_rope_channels_last_in_each_head() -> None:
    case = (RopeHalfSwap(ANY), with_indexer(head_dim=5, rope=2), {"tensor": 10}, 1)
    stored = forward(case, {"tensor": np.arange(10).reshape(10, 1)})
    assert stored.ravel().tolist() == [2, 3, 4, 0, 1, 7, 8, 9, 5, 6]


def test_gate_rows_come_before_up_rows() -> None:
    case = (GateUp(ANY, ANY), SPEC, {"gate": 2, "up": 2}, 1)
    stored = forward(case, {"gate": np.array([[1], [2]]), "up": np.array([[3], [4]])})
    assert stored.ravel().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("via", [Same(ANY), GateUp(ANY, ANY), GroupedQKV(ANY, ANY, ANY), ColumnHalfSwap(ANY)])
def test_slots_are_the_named_tensors(via: Transform) -> None:
    assert all(hf is ANY for hf in via.slots().values())
    assert len(via.slots()) in (1, 2, 3)
