"""Write a Hugging Face checkpoint with the widths of a released model and few layers, quickly.

Random weights, made tensor by tensor on the device and written shard by shard, so that neither a
model nor a checkpoint is ever in memory. Example:
``python scripts/wide_checkpoint.py --config tests/data/configs/glm-5.2.json --out DIR --layers 3``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from glmconv.tables.expand import HfTensor, hf_layout
from glmconv.tables.registry import get_bridge

SHARD_BYTES = 4 * 10**9
WRITERS = 4


def shortened(config: dict[str, Any], layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of ``layers`` layers: dense, then MoE; every second one shares its index."""
    short = {**config, **changes, "num_hidden_layers": layers}
    short.setdefault("num_nextn_predict_layers", 0)
    if "num_nextn_predict_layers" not in changes and "num_nextn_predict_layers" in config:
        short["num_nextn_predict_layers"] = 0
    if "first_k_dense_replace" in config:
        short["first_k_dense_replace"] = 1
    if config.get("mlp_layer_types"):
        short["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    if config.get("indexer_types"):
        freq, offset = 2, 2
        owners = [max(layer + 1 - offset, 0) % freq == 0 for layer in range(layers)]
        short |= {"index_topk_freq": freq, "index_skip_topk_offset": offset}
        short["indexer_types"] = ["full" if owner else "shared" for owner in owners]
    return short


def random_tensor(tensor: HfTensor, dtype: torch.dtype, device: str) -> Tensor:
    """Norms near 1, biases near 0, matrices that keep activations near 1 and choices far from even."""
    noise = torch.randn(tensor.shape, device=device, dtype=torch.float32)
    if tensor.name.endswith("norm.weight"):
        noise = 1.0 + 0.1 * noise
    elif len(tensor.shape) == 1:
        noise = 0.1 * noise
    elif "embed" not in tensor.name:
        noise = noise * (1.1 / tensor.shape[-1] ** 0.5)
    return noise.to(torch.float32 if tensor.lock is not None else dtype).cpu()


def shards(tensors: list[HfTensor], itemsize: int, limit: int) -> Iterator[list[HfTensor]]:
    """Runs of tensors of at most ``limit`` bytes."""
    shard: list[HfTensor] = []
    filled = 0
    for tensor in tensors:
        size = torch.Size(tensor.shape).numel() * itemsize
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def write_checkpoint(
    config: dict[str, Any], out: Path, *, dtype: torch.dtype, device: str, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write all tensors that ``config`` asks for; return their bytes."""
    bridge = get_bridge(config["model_type"])
    tensors = list(hf_layout(bridge.table, bridge.spec(config, {})).tensors())
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(20250)
    parts = list(shards(tensors, dtype.itemsize, shard_bytes))
    places: dict[str, str] = {}

    def write(number: int) -> int:
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        made = {one.name: random_tensor(one, dtype, device) for one in parts[number]}
        save_file(made, out / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(made, name))
        return sum(one.nbytes for one in made.values())

    with ThreadPoolExecutor(WRITERS if device != "cpu" else 1) as pool:
        total = sum(pool.map(write, range(len(parts))))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return total


def main(
    config: Annotated[Path, typer.Option(help="config.json of the released model.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    layers: Annotated[int, typer.Option(min=1, help="How many layers.")] = 3,
    change: Annotated[
        list[str] | None, typer.Option(help="FIELD=NUMBER of config.json, for instance vocab_size=8192.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="torch dtype of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where random numbers are made: cpu or cuda.")] = "cpu",
) -> None:
    """Write one checkpoint and print its size."""
    changes = {field: int(number) for field, _, number in (one.partition("=") for one in change or [])}
    short = shortened(json.loads(config.read_text()), layers, changes)
    short["dtype" if "dtype" in short else "torch_dtype"] = dtype
    total = write_checkpoint(short, out, dtype=getattr(torch, dtype), device=device)
    typer.echo(f"{out}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    typer.run(main)
