"""A Megatron optimizer with state, for checkpoints as trainers write them."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SEED = 7


class _CudaAsCpu(TorchFunctionMode):
    """megatron-core's optimizers name the device ``cuda`` outright and ask for CUDA tensor types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        return out.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else out


def optimizer_with_state(model: Any, *, distributed: bool) -> Any:
    """Adam over ``model`` after one step on random gradients.

    ``distributed``: megatron-core's ``DistributedOptimizer``, which owns flat slices of the
    parameters; otherwise one that keeps the state of whole parameters. The step has a learning
    rate of 0, so the weights stay as they are.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model.requires_grad_(True)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    config = OptimizerConfig(
        optimizer="adam", lr=0.0, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=distributed
    )
    generator = torch.Generator().manual_seed(SEED)
    with _CudaAsCpu():
        optimizer = get_megatron_optimizer(config, [wrapped])
        for parameter in model.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    return optimizer
