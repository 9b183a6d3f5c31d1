"""A checkpoint ten times larger than the memory allowed is verified within it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.support import mcore_run, verify_jobs
from tests.support.checkpoints import real_config, wide_checkpoint
from tests.support.conversions import to_megatron

LAYERS = 40
WIDTHS = {
    "hidden_size": 256,
    "moe_intermediate_size": 160,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_ten_times_the_memory(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    lane = "0.16.1"
    config = wide_checkpoint.shortened(real_config("qwen3-30b-a3b"), LAYERS, WIDTHS)
    hf = tmp_path / "hf"
    size = wide_checkpoint.write_checkpoint(
        config, hf, dtype=torch.float32, device="cpu", shard_bytes=50 << 20
    )
    limit = size // 10
    small = checkpoint("qwen3-moe")
    found = mcore_run.run(
        verify_jobs.verify_within,
        lane=lane,
        arguments={
            "warm": [str(small), str(to_megatron(small, tmp_path / "small", "mcore-0.18"))],
            "pair": [str(hf), str(to_megatron(hf, tmp_path / "large", "mcore-0.18"))],
            "limit": limit,
            "folder": str(tmp_path),
        },
    )[0]
    assert found["verdict"] == "verified", found["reason"]
    assert len([place for place in found["places"] if place["name"].startswith("layer")]) == LAYERS
    assert size > 10 * found["seen"], f"{found['seen'] / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB"
    assert found["peak_memory"] <= limit
    # What verify says of itself is about what another process saw, which counts from a little earlier.
    assert 0.5 * found["seen"] < found["peak_memory"] < found["seen"] + 5e6
