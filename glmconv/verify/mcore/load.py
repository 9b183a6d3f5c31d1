"""Loading and saving Megatron models with megatron-core's own ``dist_checkpointing``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from glmconv.basics.errors import DataError, Defect, StorageError
from glmconv.verify.mcore.slices import Slice, read_slices

EXTRA_STATE = "_extra_state"


class LoadedKeys(NamedTuple):
    """Where model and checkpoint disagree, in torch's sense of the words, over all ranks.

    ``missing``: keys that the model asks for and the checkpoint lacks. ``unexpected``: keys of
    the checkpoint that no rank of the model asks for. (megatron-core uses them the other way.)
    """

    missing: frozenset[str]
    unexpected: frozenset[str]


class TorchDist:
    """A checkpoint directory (the one with ``.metadata``), its metadata read once for many loads.

    Raises ``StorageError`` where there is no checkpoint that this megatron-core reads.
    """

    def __init__(self, path: str | Path) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
        from torch.distributed.checkpoint.api import CheckpointException

        self.where = str(path)
        if not os.path.exists(os.path.join(self.where, ".metadata")):
            raise StorageError(
                "no .metadata here", where=self.where, hint="name the iter_* or release directory"
            )
        try:
            self.shapes = {
                item.key: tuple(getattr(item, "global_shape", ()))
                for item in load_sharded_metadata(self.where).values()
            }
            self.metadata = dict(dist_checkpointing.load_content_metadata(self.where) or {})
        except (CheckpointingException, CheckpointException, OSError, AttributeError) as error:
            # AttributeError: megatron-core 0.16 stumbles in its own report of a missing common.pt.
            raise StorageError(
                f"megatron-core {_version()} cannot read this checkpoint: {_reason(error)}",
                where=self.where,
                hint="up to 0.18 it needs metadata.json and common.pt, "
                "which megatron-core 0.19 no longer writes",
            ) from error
        if any(key.startswith("decoder.layers.0.") for key in self.shapes):
            self.metadata["non_homogeneous_layers"] = True

    def load(self, model: Any) -> LoadedKeys:
        """Load all of ``model``, as a trainer does; every process of the layout calls it.

        The keys are those of the model's own ``sharded_state_dict`` under the checkpoint's
        ``content_metadata``. Missing ``_extra_state`` objects are returned (a trainer refuses
        them); ``load_state_dict`` is strict about everything else. Raises ``DataError`` for a
        missing tensor or a shape that does not fit.
        """
        from megatron.core.dist_checkpointing.validation import StrictHandling

        sharded = _sharded_state(model, dict(self.metadata))
        _require_tensors(sharded, self.shapes, self.where)
        state, not_asked, not_there = self._read({"model": sharded}, strict=StrictHandling.RETURN_ALL)
        _load_strictly(model, state["model"])
        missing = frozenset().union(*_from_all(not_there))
        return LoadedKeys(missing, frozenset(not_asked) - {"common_state"})

    def load_part(self, stage: Any) -> None:
        """Load a piece of a model from a checkpoint of the whole; ``stage`` names its keys.

        Nothing outside the piece is read. Raises as ``load`` does.
        """
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

        sharded = {
            name: item
            for name, item in _sharded_state(stage, dict(self.metadata)).items()
            if not isinstance(item, ShardedObject)
        }
        _require_tensors(sharded, self.shapes, self.where)
        if stage.axis is None or self.metadata.get("non_homogeneous_layers"):
            _load_strictly(stage, self._read({"model": sharded}, validate_access_integrity=False)["model"])
            return
        built = [
            part
            for item in sharded.values()
            for part in (nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item])
        ]
        read_slices(
            self.where,
            [
                Slice(part.key, part.global_offset, part.data[(None,) * part.prepend_axis_num])
                for part in built
            ],
        )

    def _read(self, sharded: dict[str, Any], **options: Any) -> Any:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            return dist_checkpointing.load(sharded, self.where, **options)
        except (CheckpointingException, CheckpointException) as error:
            raise DataError(
                f"megatron-core refuses the checkpoint: {_reason(error)}", where=self.where
            ) from error


def load_torch_dist(model: Any, path: str | Path) -> LoadedKeys:
    """``TorchDist(path).load(model)``: what a trainer does with the checkpoint directory ``path``."""
    return TorchDist(path).load(model)


def save_torch_dist(
    model: Any,
    path: str | Path,
    *,
    optimizer: Any = None,
    singleton_local_shards: bool = False,
    iteration: int = 1,
) -> None:
    """Write ``model`` to the directory ``path`` with ``dist_checkpointing.save``.

    Every process of the layout calls it; the directory is made. ``optimizer`` is a
    ``MegatronOptimizer`` whose state is saved beside the weights, as trainers do.
    ``singleton_local_shards`` chooses the layout of some trainers (gate, up and every expert
    under keys of their own).
    """
    import torch
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        Path(path).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content: dict[str, Any] = {
        "singleton_local_shards": singleton_local_shards,
        "chained_optim_avoid_prefix": True,
    }
    if optimizer is not None:
        content["distrib_optim_sharding_type"] = "dp_reshardable"
    sharded = _sharded_state(model, dict(content))
    state: dict[str, Any] = {"model": sharded, "checkpoint_version": 3.0, "iteration": iteration}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=with_groups(dict(content)))
    dist_checkpointing.save(state, str(path), content_metadata=content)


def _sharded_state(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    sharded: dict[str, Any] = model.sharded_state_dict(prefix="", metadata=with_groups(metadata))
    return sharded


def with_groups(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata with the process group that megatron-core's modules look up in it."""
    from megatron.core import parallel_state

    return metadata | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _require_tensors(sharded: dict[str, Any], shapes: dict[str, Any], where: str) -> None:
    """Raise with every tensor, of any rank, that the checkpoint lacks or holds in another shape."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    defects = set()
    for item in sharded.values():
        parts = nested_values(item.build()) if isinstance(item, ShardedTensorFactory) else [item]
        for part in parts:
            if not isinstance(part, ShardedTensor):
                continue
            if part.key not in shapes:
                defects.add(Defect("missing", f"the model asks for {part.key}"))
            elif not part.allow_shape_mismatch and tuple(shapes[part.key]) != tuple(part.global_shape):
                found, wanted = tuple(shapes[part.key]), tuple(part.global_shape)
                defects.add(Defect("shape", f"{part.key} is {found}, the model asks for {wanted}"))
    everywhere = frozenset().union(*_from_all(defects))
    if everywhere:
        raise DataError(
            f"{len(everywhere)} tensors that the model needs are not in the checkpoint as it needs them",
            where=where,
            hint="is it of another dialect or another config?",
            defects=sorted(everywhere, key=lambda defect: defect.what),
        )


def _load_strictly(model: Any, state: dict[str, Any]) -> None:
    """``load_state_dict`` that forgives an absent ``_extra_state`` and nothing else."""
    for key in model.state_dict():
        if key.endswith(EXTRA_STATE):
            state.setdefault(key, None)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise DataError(f"the loaded tensors do not fit the model: {error}") from error


def _from_all(local: set[Any]) -> list[set[Any]]:
    """``local`` of every process: what a key misses may be known to one pipeline stage only."""
    import torch

    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    return gathered


def _reason(error: BaseException) -> str:
    """The first failure that torch collected from its ranks, or the error itself."""
    for failure in getattr(error, "failures", {}).values():
        return str(failure[0])
    return str(error)


def _version() -> str:
    import megatron.core

    return str(megatron.core.__version__)
