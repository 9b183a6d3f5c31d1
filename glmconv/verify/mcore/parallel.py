"""Process groups for one verification run: gloo on the CPU, NCCL where there is CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from glmconv.basics.errors import UsageError
from glmconv.verify.mcore import compat


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of tensor, pipeline and expert parallelism; ``world`` processes are the least needed."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Expert parallelism takes its ranks from the tensor and data parallel ones of a stage."""
        return self.pp * max(self.tp, self.ep)


SINGLE = Parallel()


@contextmanager
def runtime(parallel: Parallel = SINGLE) -> Iterator[Parallel]:
    """Compat steps and process groups around a block that builds and runs Megatron models.

    One process needs no environment. More processes need ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, as ``torchrun`` sets them. An existing default process
    group is used and left as it is. Raises ``UsageError`` where the world does not fit.
    """
    with compat.installed():
        import torch
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            raise UsageError("runtime was entered inside another runtime")
        owned = not torch.distributed.is_initialized()
        if owned:
            _join()
        try:
            world = torch.distributed.get_world_size()
            if world % parallel.world:
                raise UsageError(
                    f"{world} processes do not fit tp {parallel.tp}, pp {parallel.pp}, ep {parallel.ep}",
                    hint=f"start {parallel.world} processes",
                )
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=1,
            )
            if torch.cuda.is_available():
                from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

                model_parallel_cuda_manual_seed(1)
            yield parallel
        finally:
            parallel_state.destroy_model_parallel()
            if owned and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _join() -> None:
    """Join the default process group that the environment describes, or a group of one."""
    import torch

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.distributed.init_process_group(backend)
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
