"""What the cloning tests do inside the processes of ``mcore_run``."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open

from glmconv.verify.mcore.parallel import runtime


def load_plainly(unit: str, samples: list[list[Any]]) -> dict[str, Any]:
    """Load a unit by megatron-core's own loader of all tensors.

    A sample is (stored name, leading indices, first row, rows, safetensors file, Hugging Face name).
    Returns how many tensors there are, all their bytes, and the samples that differ.
    """
    from megatron.core import dist_checkpointing

    torch.set_num_threads(1)
    with runtime():
        state = dist_checkpointing.load_plain_tensors(unit)
    differing = []
    for stored, index, first, rows, file, name in samples:
        with safe_open(file, "pt") as source:
            expected = source.get_tensor(name)
        found = state[stored][tuple(index)] if index else state[stored]
        if not torch.equal(found[first : first + rows], expected):
            differing.append(name)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {
        "tensors": len(tensors),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "samples": len(samples),
        "differing": differing,
    }
