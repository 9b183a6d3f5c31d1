"""Names of the ``_extra_state`` objects that trainers expect beside the weights.

Transformer Engine's modules keep FP8 state there. A load by Megatron's default strictness fails
where an expected one is missing and tolerates spare ones, and which are expected depends on the
trainer's modules. So a superset is written: one for each module that has a weight and may be a
linear or a norm, each with the stored value :data:`EMPTY_STATE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from glmconv.formats.torchdist.archive import saved

EMPTY_STATE = saved(b"\x80\x02]q\x00Na.")
"""``torch.save([None])``: megatron-core stores an object as a list of one."""

_STACKED = "decoder.layers."
_EXPERTS = ".experts.experts."

# Weights of modules that are no linear and no norm: they have no extra state in any backend.
_PLAIN = ("embedding.", ".router", ".conv1d")


def extra_state_names(tensors: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names of the objects for the tensors of a checkpoint (megatron names to global shapes).

    A module whose weights are stacked over layers or experts has one object for each:
    ``decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.5_4.8`` is expert 5 of 8 in
    layer 0 of 4 (megatron-core, ``ShardedObject.unique_key``).
    """
    names: dict[str, None] = {}
    for name, shape in tensors.items():
        module, weight, _ = name.partition(".weight")
        if not weight or any(part in f"{module}." for part in _PLAIN):
            continue
        for shard in _shards(shape[: _stacked_dims(module)]):
            names[f"{module}._extra_state/{shard}"] = None
    return list(names)


def _stacked_dims(module: str) -> int:
    """How many leading dimensions of a module's weight count layers and experts."""
    rest = module.removeprefix(_STACKED)
    layers = int(rest != module and not rest.partition(".")[0].isdigit())
    after_experts = module.partition(_EXPERTS)[2]
    return layers + int(bool(after_experts) and not after_experts.partition(".")[0].isdigit())


def _shards(counts: tuple[int, ...]) -> Iterator[str]:
    counts = counts or (1,)
    whole = ".".join(map(str, counts))
    for offsets in product(*map(range, counts)):
        yield f"shard_{'.'.join(map(str, offsets))}_{whole}"
