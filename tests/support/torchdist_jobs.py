"""What the format's oracle tests do inside the processes that ``mcore_run`` starts.

Arguments and results are plain values, so that the same job runs with every megatron-core.
"""

from __future__ import annotations

import dataclasses
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from glmconv.verify.mcore import compat
from glmconv.verify.mcore.model import build_model
from glmconv.verify.mcore.parallel import runtime
from tests.support import mcore_models

DTYPES = ("float32", "bfloat16", "float16", "int64", "uint8", "float8_e4m3fn")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in order, as they lie in a file."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sample(shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    """The same tensor of that shape in every process."""
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype))


@compat.installed()
def save_as_megatron(out: str) -> dict[str, Any]:
    """Save tensors of all kinds with ``dist_checkpointing.save``; return what each holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    held: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for seed, dtype in enumerate(DTYPES):
        tensor = sample([8, 6], dtype, seed)
        held[f"plain.{dtype}"] = tensor
        state[f"plain.{dtype}"] = ShardedTensor.from_rank_offsets(f"plain.{dtype}", tensor)
    rows = sample([8, 6], "bfloat16", 11)
    held["cut.rows"] = rows
    columns = sample([8, 6], "bfloat16", 12)
    held["cut.columns"] = columns
    stacked = sample([3, 4, 5], "float32", 13)
    held["stacked"] = stacked
    for i in range(4):
        state[f"rows{i}"] = ShardedTensor.from_rank_offsets("cut.rows", rows[2 * i : 2 * i + 2], (0, i, 4))
    for i in range(2):
        part = columns[:, 3 * i : 3 * i + 3]  # not contiguous in memory
        state[f"columns{i}"] = ShardedTensor.from_rank_offsets("cut.columns", part, (1, i, 2))
    for i in range(3):
        state[f"stacked{i}"] = ShardedTensor.from_rank_offsets(
            "stacked", stacked[i], (0, i, 3), prepend_axis_num=1
        )
    for i in range(2):
        state[f"state{i}"] = ShardedObject("module._extra_state", io.BytesIO(b"state"), (2,), (i,))
    args = Namespace(num_layers=4, params_dtype=torch.bfloat16, nothing=None, ratio=0.5, sizes=[1, 2])
    state |= {"args": args, "iteration": 12, "checkpoint_version": 3.0}
    Path(out).mkdir(parents=True, exist_ok=True)
    with runtime():
        dist_checkpointing.save(state, out, content_metadata={"singleton_local_shards": False})
    return {name: [list(tensor.shape), bytes_of(tensor).hex()] for name, tensor in held.items()}


@compat.installed()
def load_as_megatron(unit: str, shapes: dict[str, list[Any]], objects: list[str]) -> dict[str, Any]:
    """Load tensors (``{name: [shape, dtype, stacked dimensions]}``) and objects by megatron-core.

    Returns the bytes of each tensor, the value of each object and the keys that disagree.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling

    state: dict[str, Any] = {}
    for name, (shape, dtype, stacked) in shapes.items():
        whole = torch.zeros(shape, dtype=getattr(torch, dtype))
        if stacked:
            for i in range(shape[0]):
                state[f"{name}/{i}"] = ShardedTensor.from_rank_offsets(
                    name, whole[i], (0, i, shape[0]), prepend_axis_num=1
                )
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, whole)
    for unique in objects:
        key, _, shard = unique.rpartition("/shard_")
        at, _, of = shard.partition("_")
        offsets, counts = tuple(map(int, at.split("."))), tuple(map(int, of.split(".")))
        state[unique] = ShardedObject(key, None, counts, offsets)
    with runtime():
        loaded, unexpected, missing = dist_checkpointing.load(state, unit, strict=StrictHandling.RETURN_ALL)
        common = dist_checkpointing.load_common_state_dict(unit)
        content = dist_checkpointing.load_content_metadata(unit)
    tensors = {}
    for name, (shape, _, stacked) in shapes.items():
        parts = [loaded[f"{name}/{i}"] for i in range(shape[0])] if stacked else [loaded[name]]
        tensors[name] = "".join(bytes_of(part).hex() for part in parts)
    return {
        "tensors": tensors,
        "objects": {unique: repr(loaded[unique]) for unique in objects},
        "missing": sorted(missing),
        "unexpected": sorted(set(unexpected) - {"common_state"}),
        "common": sorted(common),
        "content": dict(content or {}),
        "num_layers": common["args"].num_layers,
        "params_dtype": str(common["args"].params_dtype),
    }


@compat.installed()
def load_fragment(
    unit: str, key: str, shape: list[int], fragment: list[int], rows: list[int]
) -> dict[str, Any]:
    """Load one of several equal ranges of an fp32 tensor's rows, as one rank of tensor parallelism does.

    ``shape`` is the range's own, ``fragment`` its number and how many there are. Returns the first, second
    and last element of ``rows`` and how many elements are not zero.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state = {key: ShardedTensor.from_rank_offsets(key, torch.empty(shape), (0, *fragment))}
    with runtime():
        # The other ranks, whose ranges the check would miss, do not run.
        loaded = dist_checkpointing.load(state, unit, validate_access_integrity=False)[key]
    values = [[float(loaded[row, col]) for col in (0, 1, -1)] for row in rows]
    return {"values": values, "nonzero": int(loaded.count_nonzero())}


@compat.installed()
def configs_of_args(units: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The ``TransformerConfig`` that a trainer makes of each checkpoint's args: its plain fields."""
    from megatron.core import dist_checkpointing

    with runtime():
        return {
            name: _config(dist_checkpointing.load_common_state_dict(unit)["args"])
            for name, unit in units.items()
        }


def _config(args: Namespace) -> dict[str, Any]:
    """As Megatron-LM and Megatron-Bridge do it: every field that args has, and some by other names."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in vars(args).items() if name in names}
    values["num_moe_experts"] = args.num_experts
    values["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    values["pipeline_dtype"] = args.params_dtype
    values["cp_comm_type"] = args.cp_comm_type[0]
    values["gated_linear_unit"] = args.swiglu
    values["activation_func"] = torch.nn.functional.silu
    plain = (bool, int, float, str, list, type(None))
    return {name: value for name, value in vars(kind(**values)).items() if isinstance(value, plain)}


@compat.installed()
def expected_objects(family: str) -> dict[str, Any]:
    """Names of the objects that a real model asks for, and shapes of its tensors, by key."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    with runtime():
        model = build_model(mcore_models.tiny(family).spec)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = model.sharded_state_dict(prefix="", metadata={"dp_cp_group": group})
    objects, shapes = set(), {}
    for item in state.values():
        for part in nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]:
            if isinstance(part, ShardedObject):
                objects.add(part.unique_key)
            elif isinstance(part, ShardedTensor):
                shapes[part.key] = list(part.global_shape)
    return {"objects": sorted(objects), "shapes": shapes}
