"""The ways in which faults change a Megatron-side state, and the sizes that they cut at.

Everything counts from a tensor's last axes, so it works on stacked and per-layer tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glmconv.tables.spec import ModelSpec

State = Mapping[str, Tensor]
"""Tensors by their keys on disk. A mapping that reads them only when asked will do."""

Changes = dict[str, Callable[[], Tensor]]
"""What a fault makes of some keys, each computed when called."""

Edit = Callable[[Tensor, "Geometry"], Tensor]
Change = Callable[[State, "Geometry"], Changes]

ROWS, COLUMNS, EXPERTS = -2, -1, -3
"""Axes of ``[..., E, rows, columns]``; the rows of a bias or a norm are its last axis."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that faults cut at. MLA, indexer and groups are 0 where a model has none."""

    heads: int
    groups: int = 0
    head_dim: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0
    kv_rank: int = 0
    index_dim: int = 0


def geometry(spec: ModelSpec) -> Geometry:
    """The sizes of one model."""
    if spec.mla is None:
        return Geometry(spec.num_heads, spec.num_groups, spec.head_dim)
    return Geometry(
        spec.num_heads,
        nope=spec.mla.qk_nope_head_dim,
        rope=spec.mla.qk_rope_head_dim,
        value=spec.mla.v_head_dim,
        kv_rank=spec.mla.kv_lora_rank,
        index_dim=spec.dsa.head_dim if spec.dsa else 0,
    )


DROPPED = torch.empty(0)
"""Stands for a tensor that the fault removes."""


# ---------------------------------------------------------------- ways to change a state


def each(edits: Mapping[str, Edit]) -> Change:
    """Change every tensor whose key ends with one of the suffixes."""

    def change(state: State, sizes: Geometry) -> Changes:
        return {
            key: _edited(state, key, edit, sizes)
            for key in state
            for suffix, edit in edits.items()
            if key.endswith(suffix)
        }

    return change


def _edited(state: State, key: str, edit: Edit, sizes: Geometry) -> Callable[[], Tensor]:
    return lambda: edit(state[key], sizes).to(state[key].dtype)


def _instead(state: State, key: str, other: str) -> Callable[[], Tensor]:
    """``other`` in the place of ``key``, or ``key`` itself where the shapes differ."""
    return lambda: state[other] if state[other].shape == state[key].shape else state[key]


def swap(*pairs: tuple[str, str]) -> Change:
    """Swap tensors whose keys differ in their suffix only, where both exist in one shape."""

    def change(state: State, sizes: Geometry) -> Changes:
        changed: Changes = {}
        for left, right in pairs:
            for key in state:
                other = key.removesuffix(left) + right
                if key.endswith(left) and other in state:
                    changed[key], changed[other] = _instead(state, key, other), _instead(state, other, key)
        return changed

    return change


def copy(target: str, source: str) -> Change:
    """One named tensor takes the values of another."""

    def change(state: State, sizes: Geometry) -> Changes:
        there = target in state and source in state
        return {target: _instead(state, target, source)} if there else {}

    return change


def drop_mtp(state: State, sizes: Geometry) -> Changes:
    """The keys of MTP layers are gone."""
    return {key: lambda: DROPPED for key in state if key.startswith("mtp.")}


def mtp_from_decoder(state: State, sizes: Geometry) -> Changes:
    """The MTP layer's block is a copy of the last decoder layer (per-layer keys)."""
    numbers = [int(key.split(".")[2]) for key in state if key.startswith("decoder.layers.") and _number(key)]
    if not numbers:
        return {}
    block = "mtp.layers.0.transformer_layer."
    changed: Changes = {}
    for key in state:
        source = f"decoder.layers.{max(numbers)}.{key.removeprefix(block)}"
        if key.startswith(block) and source in state:
            changed[key] = _instead(state, key, source)
    return changed


def from_neighbour(suffix: str) -> Change:
    """The last layer that has the tensor takes it from the layer before that has one."""

    def change(state: State, sizes: Geometry) -> Changes:
        keys = [key for key in state if key.startswith("decoder.layers.") and key.endswith(suffix)]
        changed = {key: _moved(state, key, -2, -2) for key in keys if not _number(key)}
        layers = sorted((key for key in keys if _number(key)), key=lambda key: int(key.split(".")[2]))
        if len(layers) > 1:
            changed[layers[-1]] = _instead(state, layers[-1], layers[-2])
        return changed

    return change


def layers_swapped(state: State, sizes: Geometry) -> Changes:
    """The last two layers that hold the same tensors change places as a whole."""
    changed: Changes = {}
    layers: dict[int, set[str]] = {}
    for key in state:
        if key.startswith("decoder.layers.") and not _number(key):
            changed[key] = _moved(state, key, -1, -2)
        elif key.startswith("decoder.layers."):
            number, rest = key.removeprefix("decoder.layers.").split(".", 1)
            layers.setdefault(int(number), set()).add(rest)
    pairs = [layer for layer in layers if layers[layer] == layers.get(layer + 1)]
    for rest in layers[max(pairs)] if pairs else ():
        left, right = f"decoder.layers.{max(pairs)}.{rest}", f"decoder.layers.{max(pairs) + 1}.{rest}"
        changed[left], changed[right] = _instead(state, left, right), _instead(state, right, left)
    return changed


def _moved(state: State, key: str, before: int, last: int) -> Callable[[], Tensor]:
    """Stacked layers, the last two places taken by the layers ``before`` and ``last``."""

    def take() -> Tensor:
        stacked = state[key]
        return torch.cat([stacked[:-2], stacked[before][None], stacked[last][None]])

    return take


def _number(key: str) -> bool:
    return key.split(".")[2].isdigit()


# ---------------------------------------------------------------- edits of one tensor


def _by_group(tensor: Tensor, sizes: Geometry, axis: int) -> Tensor:
    """``[..., (r + 2) * D * G, ...]`` to ``[..., G, r + 2, D, ...]``: heads, then key, then value."""
    if not sizes.groups:
        raise ValueError("no groups")
    return torch.unflatten(tensor, axis, (sizes.groups, sizes.heads // sizes.groups + 2, sizes.head_dim))


def qkv(edit: Callable[[Tensor, int], Tensor], axis: int = ROWS) -> Edit:
    """Edit fused QKV; ``edit`` sees groups at ``where``, slots behind it, head rows behind those."""

    def apply(tensor: Tensor, sizes: Geometry) -> Tensor:
        where = tensor.dim() + axis
        edited = edit(_by_group(tensor, sizes, axis), where)
        return edited.reshape(tensor.shape)

    return apply


def slots(tensor: Tensor, where: int, first: int, second: int) -> Tensor:
    order = list(range(tensor.shape[where + 1]))
    order[first], order[second] = order[second], order[first]
    return tensor.index_select(where + 1, torch.tensor(order))


def flat_qkv(tensor: Tensor, where: int) -> Tensor:
    """All query heads, then all keys, then all values."""
    heads = tensor.shape[where + 1] - 2
    query, key, value = torch.split(tensor, [heads, 1, 1], dim=where + 1)
    return torch.cat([part.flatten(where, where + 1) for part in (query, key, value)], dim=where)


def half_split_heads(tensor: Tensor, where: int) -> Tensor:
    """Query and key channels reordered evens then odds, as if rotary pairs were interleaved."""
    heads = tensor.shape[where + 1] - 2
    query_key, value = torch.split(tensor, [heads + 1, 1], dim=where + 1)
    dim = where + 2
    size = query_key.shape[dim]
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    return torch.cat([query_key.index_select(dim, order), value], dim=where + 1)


def exchange(sizes_of: Callable[[Geometry], tuple[int, int]], *, per_head: bool, axis: int = ROWS) -> Edit:
    """Exchange two neighbouring ranges of rows, ``[a | b]`` to ``[b | a]``, in each head or once."""

    def apply(tensor: Tensor, sizes: Geometry) -> Tensor:
        first, second = sizes_of(sizes)
        blocks = (
            torch.unflatten(tensor, axis, (-1, first + second)) if per_head else tensor.unsqueeze(axis - 1)
        )
        left, right = torch.split(blocks, [first, second], dim=axis)
        return torch.cat([right, left], dim=axis).reshape(tensor.shape)

    return apply


def index_halves(axis: int) -> Edit:
    return exchange(lambda sizes: (sizes.rope, sizes.index_dim - sizes.rope), per_head=True, axis=axis)


def values_after_keys(tensor: Tensor, sizes: Geometry) -> Tensor:
    """Per head ``[nope | value]`` to all nope rows, then all value rows."""
    blocks = torch.unflatten(tensor, ROWS, (sizes.heads, sizes.nope + sizes.value))
    parts = torch.split(blocks, [sizes.nope, sizes.value], dim=ROWS)
    return torch.cat([part.flatten(-3, -2) for part in parts], dim=ROWS)


def rope_pairs_lost(rope_last: Callable[[Geometry], int]) -> Edit:
    """The rope rows at the end of each block, interleaved pairs, become evens then odds."""

    def apply(tensor: Tensor, sizes: Geometry) -> Tensor:
        blocks = torch.unflatten(tensor, ROWS, (-1, rope_last(sizes)))
        keep, rope = torch.split(blocks, [rope_last(sizes) - sizes.rope, sizes.rope], dim=ROWS)
        rope = torch.cat([rope[..., 0::2, :], rope[..., 1::2, :]], dim=ROWS)
        return torch.cat([keep, rope], dim=ROWS).reshape(tensor.shape)

    return apply


def halves(axis: int) -> Edit:
    return lambda tensor, sizes: torch.cat(tensor.chunk(2, dim=axis)[::-1], dim=axis)


def interleaved_halves(tensor: Tensor, sizes: Geometry) -> Tensor:
    """Gate and up rows alternate instead of standing one after the other."""
    return torch.stack(tensor.chunk(2, dim=ROWS), dim=ROWS).flatten(-3, -2)


def rolled(axis: int) -> Edit:
    return lambda tensor, sizes: tensor.roll(1, dims=axis)


def last_repeats_first(tensor: Tensor, sizes: Geometry) -> Tensor:
    return torch.cat(
        [tensor.narrow(EXPERTS, 0, tensor.shape[EXPERTS] - 1), tensor.narrow(EXPERTS, 0, 1)], EXPERTS
    )


def zeros(tensor: Tensor, sizes: Geometry) -> Tensor:
    return torch.zeros_like(tensor)


def ones_if_latent(tensor: Tensor, sizes: Geometry) -> Tensor:
    return torch.ones_like(tensor) if sizes.kv_rank else tensor


def minus_one(tensor: Tensor, sizes: Geometry) -> Tensor:
    return tensor - 1


def through_bf16(tensor: Tensor, sizes: Geometry) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)
