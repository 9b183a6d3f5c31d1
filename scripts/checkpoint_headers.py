"""Checkpoints written without torch: full-size headers on sparse files, and random gigabytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from golden_patterns import TensorInfo, expand, natural_order

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
FULL_MODELS = ("glm-5", "glm-5.1", "glm-5.2", "glm-4.5", "glm-4.5-air", "qwen3-0.6b", "qwen3-30b-a3b")
ITEM_SIZES = {"BF16": 2, "F32": 4}
RANDOM_CHUNK = 8 << 20
"""Bytes of random data made and written at a time: what bounds the memory."""


def make_headers_only(model: str, out: Path, *, shard_bytes: int = 5 * 10**9, optional: bool = False) -> Path:
    """The full real-size checkpoint of ``model``: real headers, index and config, data as holes.

    Names, shapes and dtypes come from ``tests/data/golden``. Files have their true length but take
    no room on a filesystem with sparse files. ``optional`` adds what a release stores twice (the tied
    head of Qwen3-0.6B). Raises ``ValueError`` and ``FileExistsError``.
    """
    if model not in FULL_MODELS:
        raise ValueError(f"unknown full-size model {model!r}, known: {', '.join(FULL_MODELS)}")
    golden = json.loads((DATA / "golden" / f"{model}.json").read_text())
    config = json.loads((DATA / "configs" / f"{model}.json").read_text())
    patterns = golden["tensors"] | (golden.get("optional", {}) if optional else {})
    write_layout(out, config, expand(patterns), shard_bytes)
    return out


def make_proportioned(out: Path, gigabytes: float, *, seed: int = 0, shard_bytes: int = 10**9) -> Path:
    """At least ``gigabytes`` (1e9 B) of random finite data with GLM-5.2's widths and proportions.

    Layers, heads, vocabulary and experts are fewer; hidden size and expert matrices are the real
    ones, so that tensors and runs have the real lengths. One dense and three MoE layers, one of
    which shares its index, and an MTP layer. Memory stays at one chunk. Raises ``FileExistsError``.
    """
    config = json.loads((DATA / "configs" / "glm-5.2.json").read_text())
    config.update(
        first_k_dense_replace=1,
        index_skip_topk_offset=1,
        index_topk_freq=2,
        indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_attention_heads=8,
        num_hidden_layers=4,
        num_key_value_heads=8,
        vocab_size=8192,
    )
    fixed = _bytes_of(glm_moe_dsa_tensors(config | {"n_routed_experts": 0}))
    per_expert = _bytes_of(glm_moe_dsa_tensors(config | {"n_routed_experts": 2})) - fixed
    pairs = max(1, math.ceil((gigabytes * 10**9 - fixed) / per_expert))
    config["n_routed_experts"] = 2 * pairs
    config["num_experts_per_tok"] = min(config["num_experts_per_tok"], 2 * pairs)
    tensors = glm_moe_dsa_tensors(config)
    files = write_layout(out, config, tensors, shard_bytes)
    generator = np.random.Generator(np.random.SFC64(seed))
    for path, start in files.items():
        _fill_random(path, start, generator)
    return out


def glm_moe_dsa_tensors(config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Hub names, shapes and dtypes of a GLM-5 class model, straight from its raw config."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    tensors: dict[str, TensorInfo] = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors[name] = (shape, dtype)

    def add_mlp(prefix: str, ffn: int) -> None:
        add(f"{prefix}.gate_proj.weight", ffn, hidden)
        add(f"{prefix}.up_proj.weight", ffn, hidden)
        add(f"{prefix}.down_proj.weight", hidden, ffn)

    def add_attention(prefix: str, indexer: bool) -> None:
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        add(f"{prefix}.q_a_proj.weight", q_rank, hidden)
        add(f"{prefix}.q_a_layernorm.weight", q_rank)
        add(f"{prefix}.q_b_proj.weight", heads * (nope + rope), q_rank)
        add(f"{prefix}.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden)
        add(f"{prefix}.kv_a_layernorm.weight", kv_rank)
        add(f"{prefix}.kv_b_proj.weight", heads * (nope + value), kv_rank)
        add(f"{prefix}.o_proj.weight", hidden, heads * value)
        if indexer:
            index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
            add(f"{prefix}.indexer.wq_b.weight", index_heads * index_dim, q_rank)
            add(f"{prefix}.indexer.wk.weight", index_dim, hidden)
            add(f"{prefix}.indexer.k_norm.weight", index_dim)
            add(f"{prefix}.indexer.k_norm.bias", index_dim)
            add(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)

    def add_layer(layer: int, sparse: bool, indexer: bool) -> None:
        prefix = f"model.layers.{layer}"
        add(f"{prefix}.input_layernorm.weight", hidden)
        add(f"{prefix}.post_attention_layernorm.weight", hidden)
        add_attention(f"{prefix}.self_attn", indexer)
        if not sparse:
            add_mlp(f"{prefix}.mlp", config["intermediate_size"])
            return
        experts, ffn = config["n_routed_experts"], config["moe_intermediate_size"]
        add(f"{prefix}.mlp.gate.weight", experts, hidden, dtype="F32")
        add(f"{prefix}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        for expert in range(experts):
            add_mlp(f"{prefix}.mlp.experts.{expert}", ffn)
        add_mlp(f"{prefix}.mlp.shared_experts", ffn * config["n_shared_experts"])

    add("model.embed_tokens.weight", config["vocab_size"], hidden)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        sparse = config["mlp_layer_types"][layer] == "sparse"
        add_layer(layer, sparse, config["indexer_types"][layer] == "full")
    add("model.norm.weight", hidden)
    add("lm_head.weight", config["vocab_size"], hidden)
    for layer in range(layers, layers + config["num_nextn_predict_layers"]):
        add_layer(layer, sparse=True, indexer=True)
        add(f"model.layers.{layer}.enorm.weight", hidden)
        add(f"model.layers.{layer}.hnorm.weight", hidden)
        add(f"model.layers.{layer}.eh_proj.weight", hidden, 2 * hidden)
        add(f"model.layers.{layer}.shared_head.norm.weight", hidden)
    return tensors


def write_layout(
    out: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], shard_bytes: int
) -> dict[Path, int]:
    """Config, index and shards whose data is a hole. Returns where the data of each shard starts."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; name a new directory")
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors, key=natural_order):
        info = tensors[name]
        if shards[-1] and filled + _size(info) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _size(info)
    starts, weight_map = {}, {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        starts[out / file] = _write_shard(out / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": _bytes_of(tensors)}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=0))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return starts


def _write_shard(path: Path, tensors: Mapping[str, TensorInfo]) -> int:
    """Header and a hole of the data's length. Wide dtypes first, as the safetensors library does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-ITEM_SIZES[tensors[name][1]], name)):
        shape, dtype = tensors[name]
        end = offset + _size(tensors[name])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)
    return 8 + len(encoded)


def _fill_random(path: Path, start: int, generator: np.random.Generator) -> None:
    """Random finite numbers over the data: one exponent bit stays 0 in bf16 and in fp32 alike."""
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        while (left := size - file.tell()) > 0:
            words = generator.integers(0, 1 << 64, size=RANDOM_CHUNK // 8, dtype=np.uint64)
            words &= np.uint64(0xBFFFBFFFBFFFBFFF)
            file.write(words.data.cast("B")[: min(left, RANDOM_CHUNK)])


def _size(info: TensorInfo) -> int:
    shape, dtype = info
    return math.prod(shape) * ITEM_SIZES[dtype]


def _bytes_of(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(_size(info) for info in tensors.values())
