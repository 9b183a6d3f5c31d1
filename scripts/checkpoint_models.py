"""Random but complete small models, built and saved by transformers, with an MTP layer added."""

from __future__ import annotations

import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from checkpoint_configs import RawConfig
from checkpoint_side_files import write_json
from golden_patterns import natural_order
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

GLM_FAMILIES = ("glm_moe_dsa", "glm4_moe")


def random_tensors(config: RawConfig, seed: int) -> dict[str, Tensor]:
    """All tensors under their hub names (one per expert), MTP included where the family has it.

    transformers builds a model of one decoder layer more than the config says, with the config's
    last layer kind; its last layer becomes the MTP layer's block, so that the block's names and
    shapes are transformers' own. The rest of an MTP layer follows the releases: GLM-4.5 repeats the
    embedding and the head there, GLM-5.2 does not (the key count of its release says so).
    """
    mtp = config.get("num_nextn_predict_layers", 0) if config["model_type"] in GLM_FAMILIES else 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_json(path / "config.json", _with_extra_layers(config, mtp))
        hf_config = AutoConfig.from_pretrained(path)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(hf_config, dtype=_torch_dtype(config))
        _fill(model.state_dict(), seed)
        quiet: Any = logging
        quiet.disable_progress_bar()
        model.save_pretrained(path, max_shard_size="10GB")
        tensors = load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + mtp):
        tensors.update(_mtp_extras(tensors, config, layer, seed))
    return tensors


def cast_named(tensors: dict[str, Tensor], suffix: str, dtype: torch.dtype) -> None:
    """Store every tensor whose name ends with ``suffix`` in ``dtype``."""
    for name, tensor in tensors.items():
        if name.endswith(suffix):
            tensors[name] = tensor.to(dtype)


def write_sharded(out: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    """``model-0000i-of-0000n.safetensors`` plus index; one ``model.safetensors`` where all fits."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors, key=natural_order):
        size = tensors[name].nbytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors[name].contiguous()
        filled += size
    if len(shards) == 1:
        save_file(shards[0], out / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)


def _torch_dtype(config: RawConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    return dtype


def _with_extra_layers(config: RawConfig, extra: int) -> RawConfig:
    """The config with ``extra`` more decoder layers: MoE, and owners of an indexer."""
    layers = dict(config, num_hidden_layers=config["num_hidden_layers"] + extra)
    if "indexer_types" in config:
        layers["indexer_types"] = config["indexer_types"] + ["full"] * extra
        layers["mlp_layer_types"] = config["mlp_layer_types"] + ["sparse"] * extra
    return layers


def _fill(state: dict[str, Tensor], seed: int) -> None:
    filled = set()
    # Backwards, so that an embedding tied to the head gets the head's values, which keep logits near 1.
    for name, tensor in reversed(state.items()):
        if tensor.data_ptr() not in filled:
            tensor.copy_(random_values(name, tensor.shape, seed))
            filled.add(tensor.data_ptr())


def random_values(name: str, shape: torch.Size | tuple[int, ...], seed: int) -> Tensor:
    """fp32 values that depend on name and seed alone, of a size that keeps activations near 1.

    Gammas lie around 1, biases are not small, so that a lost or misplaced one shows in logits;
    router biases need more bits than bf16 has.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    noise = torch.randn(tuple(shape), generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    return noise / math.sqrt(shape[-1])


def _mtp_extras(tensors: dict[str, Tensor], config: RawConfig, layer: int, seed: int) -> dict[str, Tensor]:
    """What an MTP layer has beyond a decoder block; ``eh_proj`` is ``[hidden, 2 * hidden]``."""
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}"
    shapes = {
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
    }
    dtype = _torch_dtype(config)
    extras = {name: random_values(name, shape, seed).to(dtype) for name, shape in shapes.items()}
    if config["model_type"] == "glm4_moe":
        extras[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        extras[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return extras
