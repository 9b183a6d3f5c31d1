"""The ways in which faults change a Megatron-side state, and the sizes that they cut at.

Everything counts from a tensor's last axes, so it works on stacked and per-layer tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Edit = Callable[[Tensor, "Geometry"], Tensor]

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


def geometry(config: Mapping[str, Any]) -> Geometry:
    """From a raw Hugging Face config."""
    heads = config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        return Geometry(heads, config["num_key_value_heads"], config["head_dim"])
    return Geometry(
        heads,
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        kv_rank=config["kv_lora_rank"],
        index_dim=config.get("index_head_dim", 0),
    )


DROPPED = torch.empty(0)
"""Stands for a tensor that the fault removes."""


# ---------------------------------------------------------------- ways to change a state


def each(edits: Mapping[str, Edit]) -> Callable[[State, Geometry], State]:
    """Change every tensor whose key ends with one of the suffixes; what stays equal is not changed."""

    def change(state: State, sizes: Geometry) -> State:
        changed = {}
        for key, tensor in state.items():
            for suffix, edit in edits.items():
                if key.endswith(suffix):
                    edited = edit(tensor, sizes)
                    if not torch.equal(edited, tensor):
                        changed[key] = edited.to(tensor.dtype)
        return changed

    return change


def swap(*pairs: tuple[str, str]) -> Callable[[State, Geometry], State]:
    """Swap tensors whose keys differ in their suffix only, where both exist in one shape."""

    def change(state: State, sizes: Geometry) -> State:
        changed = {}
        for left, right in pairs:
            for key in state:
                other = key.removesuffix(left) + right
                if key.endswith(left) and other in state and state[key].shape == state[other].shape:
                    changed[key], changed[other] = state[other], state[key]
        return changed

    return change


def copy(target: str, source: str) -> Callable[[State, Geometry], State]:
    """One named tensor takes the values of another."""

    def change(state: State, sizes: Geometry) -> State:
        if target not in state or source not in state or state[target].shape != state[source].shape:
            return {}
        return {target: state[source]}

    return change


def drop_mtp(state: State, sizes: Geometry) -> State:
    return {key: DROPPED for key in state if key.startswith("mtp.")}


def mtp_from_decoder(state: State, sizes: Geometry) -> State:
    """The MTP layer's block is a copy of the last decoder layer (per-layer keys)."""
    numbers = [int(key.split(".")[2]) for key in state if key.startswith("decoder.layers.") and _number(key)]
    if not numbers:
        return {}
    block = "mtp.layers.0.transformer_layer."
    changed = {}
    for key in state:
        source = f"decoder.layers.{max(numbers)}.{key.removeprefix(block)}"
        if key.startswith(block) and source in state:
            changed[key] = state[source]
    return changed


def from_neighbour(suffix: str) -> Callable[[State, Geometry], State]:
    """The last layer that has the tensor takes it from the layer before that has one."""

    def change(state: State, sizes: Geometry) -> State:
        keys = [key for key in state if key.startswith("decoder.layers.") and key.endswith(suffix)]
        changed = {key: _take(state[key], -2, -2) for key in keys if not _number(key)}
        layers = sorted((key for key in keys if _number(key)), key=lambda key: int(key.split(".")[2]))
        if len(layers) > 1:
            changed[layers[-1]] = state[layers[-2]]
        return changed

    return change


def layers_swapped(state: State, sizes: Geometry) -> State:
    """The last two layers that hold the same tensors change places as a whole."""
    changed: State = {}
    layers: dict[int, set[str]] = {}
    for key, tensor in state.items():
        if key.startswith("decoder.layers.") and not _number(key):
            changed[key] = _take(tensor, -1, -2)
        elif key.startswith("decoder.layers."):
            number, rest = key.removeprefix("decoder.layers.").split(".", 1)
            layers.setdefault(int(number), set()).add(rest)
    pairs = [layer for layer in layers if layers[layer] == layers.get(layer + 1)]
    for rest in layers[max(pairs)] if pairs else ():
        left, right = f"decoder.layers.{max(pairs)}.{rest}", f"decoder.layers.{max(pairs) + 1}.{rest}"
        changed[left], changed[right] = state[right], state[left]
    return changed


def _take(stacked: Tensor, before: int, last: int) -> Tensor:
    """The layers of ``stacked``, the last two places taken by the layers ``before`` and ``last``."""
    return torch.cat([stacked[:-2], stacked[before][None], stacked[last][None]])


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
