"""What a conversion must do to values, written out by hand with loops and ifs, in plain torch.

This is the oracle against the tables: it must never import ``mappings``, ``bridges`` or ``glmconv``.
Both directions are written separately (back: ``reference_export.py``). Tensors are the global ones
that a ``torch_dist`` checkpoint holds on disk, under on-disk keys (no ``model.`` prefix,
``mtp.layers.{i}.transformer_layer.*``).
``H`` is the hidden size, ``E`` experts, ``F`` rows of a gate matrix, ``L`` layers.

Supported: ``glm_moe_dsa``, ``glm4_moe``, ``qwen3``, ``qwen3_moe``; dialects ``mcore``, ``mcore-0.18``,
``slime``, ``miles``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_config import (
    DIALECTS,
    Config,
    State,
    check,
    has_qk_norm,
    indexer_is_swapped,
    is_sparse,
    mtp_layers,
    num_experts,
    same,
)
from .reference_export import hub_to_stacked, megatron_to_hf

__all__ = [
    "DIALECTS",
    "Config",
    "State",
    "default_layer_keys",
    "hf_to_megatron",
    "hub_to_stacked",
    "megatron_to_hf",
]


def hf_to_megatron(hf: State, config: Config, dialect: str, layer_keys: str | None = None) -> State:
    """On-disk Megatron tensors of a checkpoint given under hub names, one tensor per expert.

    ``layer_keys`` is ``stacked`` or ``per-layer``; by default what trainers of the dialect write
    (dense models stacked; all-MoE models stacked by megatron-core, per layer by slime and miles;
    models that mix dense and MoE layers per layer). Raises ``KeyError`` for a missing tensor and
    ``ValueError`` for one that is left over.
    """
    check(config, dialect)
    left = dict(hf)
    layers = config["num_hidden_layers"]
    out: State = {"embedding.word_embeddings.weight": left.pop("model.embed_tokens.weight")}
    out["decoder.final_layernorm.weight"] = left.pop("model.norm.weight")
    if config["tie_word_embeddings"]:
        head = left.pop("lm_head.weight", None)
        if head is not None and not same(head, out["embedding.word_embeddings.weight"]):
            raise ValueError("lm_head.weight differs from the embedding it is tied to")
    else:
        out["output_layer.weight"] = left.pop("lm_head.weight")

    for layer in range(layers):
        block = _block_to_megatron(left, f"model.layers.{layer}.", config, dialect, is_sparse(config, layer))
        for key, tensor in block.items():
            out[f"decoder.layers.{layer}.{key}"] = tensor

    for index in range(mtp_layers(config)):
        source = f"model.layers.{layers + index}."
        target = f"mtp.layers.{index}."
        out[target + "enorm.weight"] = left.pop(source + "enorm.weight")
        out[target + "hnorm.weight"] = left.pop(source + "hnorm.weight")
        out[target + "eh_proj.weight"] = left.pop(source + "eh_proj.weight")
        out[target + "final_layernorm.weight"] = left.pop(source + "shared_head.norm.weight")
        for key, tensor in _block_to_megatron(left, source, config, dialect, sparse=True).items():
            out[target + "transformer_layer." + key] = tensor
        for copy, original in (
            ("embed_tokens.weight", "embedding.word_embeddings.weight"),
            ("shared_head.head.weight", "output_layer.weight"),
        ):
            duplicate = left.pop(source + copy, None)
            if duplicate is not None and not same(duplicate, out[original]):
                raise ValueError(f"{source}{copy} differs from the tensor it repeats")

    if left:
        raise ValueError(f"left over: {sorted(left)[:5]} and {max(len(left) - 5, 0)} more")
    if (layer_keys or default_layer_keys(config, dialect)) == "stacked":
        return _stack_layers(out, layers)
    return out


def default_layer_keys(config: Config, dialect: str) -> str:
    """Whether the dialect's trainers write layers stacked or one key per layer."""
    if config["model_type"] == "qwen3":
        return "stacked"
    if config["model_type"] == "qwen3_moe":
        return "per-layer" if dialect in ("slime", "miles") else "stacked"
    return "per-layer"


def _block_to_megatron(left: State, source: str, config: Config, dialect: str, sparse: bool) -> State:
    """One decoder layer; takes its tensors out of ``left``. Keys have no layer prefix."""
    out: State = {}
    if config["model_type"] == "glm_moe_dsa":
        out["input_layernorm.weight"] = left.pop(source + "input_layernorm.weight")
        _latent_attention_to_megatron(left, out, source + "self_attn.", config, dialect)
    else:
        out["self_attention.linear_qkv.layer_norm_weight"] = left.pop(source + "input_layernorm.weight")
        _grouped_attention_to_megatron(left, out, source + "self_attn.", config)

    norm = left.pop(source + "post_attention_layernorm.weight")
    if not sparse:
        out["mlp.linear_fc1.layer_norm_weight"] = norm
        gate = left.pop(source + "mlp.gate_proj.weight")
        up = left.pop(source + "mlp.up_proj.weight")
        out["mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out["mlp.linear_fc2.weight"] = left.pop(source + "mlp.down_proj.weight")
        return out

    out["pre_mlp_layernorm.weight"] = norm
    out["mlp.router.weight"] = left.pop(source + "mlp.gate.weight")
    if config["model_type"] in ("glm_moe_dsa", "glm4_moe"):
        bias = left.pop(source + "mlp.gate.e_score_correction_bias")
        out["mlp.router.expert_bias"] = bias.to(torch.float32)
        gate = left.pop(source + "mlp.shared_experts.gate_proj.weight")
        up = left.pop(source + "mlp.shared_experts.up_proj.weight")
        out["mlp.shared_experts.linear_fc1.weight"] = torch.cat([gate, up])
        out["mlp.shared_experts.linear_fc2.weight"] = left.pop(source + "mlp.shared_experts.down_proj.weight")
    first, second = [], []
    for expert in range(num_experts(config)):
        prefix = f"{source}mlp.experts.{expert}."
        gate, up = left.pop(prefix + "gate_proj.weight"), left.pop(prefix + "up_proj.weight")
        first.append(torch.cat([gate, up]))
        second.append(left.pop(prefix + "down_proj.weight"))
    out["mlp.experts.experts.linear_fc1.weight"] = torch.stack(first)  # [E, 2F, H]
    out["mlp.experts.experts.linear_fc2.weight"] = torch.stack(second)  # [E, H, F]
    return out


def _latent_attention_to_megatron(left: State, out: State, source: str, config: Config, dialect: str) -> None:
    target = "self_attention."
    out[target + "linear_q_down_proj.weight"] = left.pop(source + "q_a_proj.weight")
    out[target + "linear_q_up_proj.weight"] = left.pop(source + "q_b_proj.weight")
    out[target + "linear_kv_down_proj.weight"] = left.pop(source + "kv_a_proj_with_mqa.weight")
    out[target + "linear_kv_up_proj.weight"] = left.pop(source + "kv_b_proj.weight")
    out[target + "linear_proj.weight"] = left.pop(source + "o_proj.weight")

    if dialect == "mcore":
        out[target + "q_layernorm.weight"] = left.pop(source + "q_a_layernorm.weight")
        out[target + "kv_layernorm.weight"] = left.pop(source + "kv_a_layernorm.weight")
    else:
        out[target + "linear_q_up_proj.layer_norm_weight"] = left.pop(source + "q_a_layernorm.weight")
        out[target + "linear_kv_up_proj.layer_norm_weight"] = left.pop(source + "kv_a_layernorm.weight")

    if source + "indexer.wk.weight" not in left:
        return
    query = left.pop(source + "indexer.wq_b.weight")
    key = left.pop(source + "indexer.wk.weight")
    norm_weight = left.pop(source + "indexer.k_norm.weight")
    norm_bias = left.pop(source + "indexer.k_norm.bias")
    weights = left.pop(source + "indexer.weights_proj.weight")
    if indexer_is_swapped(config, dialect):
        query = _rope_to_the_end(query, config)
        key = _rope_to_the_end(key, config)
        norm_weight = _rope_to_the_end(norm_weight, config)
        norm_bias = _rope_to_the_end(norm_bias, config)
    if dialect in ("mcore", "mcore-0.18"):
        indexer = target + "core_attention.indexer."
        out[indexer + "linear_wq_b.weight"] = query
        out[indexer + "linear_wk.weight"] = key
        out[indexer + "k_norm.weight"] = norm_weight
        out[indexer + "k_norm.bias"] = norm_bias
        out[indexer + "linear_weights_proj.weight"] = weights
    else:
        out[target + "wq_b.weight"] = query
        out[target + "wk.weight"] = key
        out[target + "k_norm.weight"] = norm_weight
        out[target + "k_norm.bias"] = norm_bias
        out[target + "weights_proj.weight"] = weights


def _grouped_attention_to_megatron(left: State, out: State, source: str, config: Config) -> None:
    target = "self_attention."
    for kind in ("weight", "bias"):
        if kind == "bias" and not config["attention_bias"]:
            continue
        query = left.pop(source + f"q_proj.{kind}")
        key = left.pop(source + f"k_proj.{kind}")
        value = left.pop(source + f"v_proj.{kind}")
        out[target + f"linear_qkv.{kind}"] = _group(query, key, value, config)
    out[target + "linear_proj.weight"] = left.pop(source + "o_proj.weight")
    if has_qk_norm(config):
        out[target + "q_layernorm.weight"] = left.pop(source + "q_norm.weight")
        out[target + "k_layernorm.weight"] = left.pop(source + "k_norm.weight")


def _group(query: Tensor, key: Tensor, value: Tensor, config: Config) -> Tensor:
    """Rows of each group: its query heads, its key head, its value head."""
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    pieces = []
    for group in range(groups):
        for head in range(heads):
            if head // (heads // groups) == group:
                pieces.append(query[head * dim : (head + 1) * dim])
        pieces.append(key[group * dim : (group + 1) * dim])
        pieces.append(value[group * dim : (group + 1) * dim])
    return torch.cat(pieces)


def _rope_to_the_end(tensor: Tensor, config: Config) -> Tensor:
    """In every index head: rope channels from first to last. ``[rope | rest]`` to ``[rest | rope]``."""
    dim, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    pieces = []
    for start in range(0, tensor.shape[0], dim):
        pieces.append(tensor[start + rope : start + dim])
        pieces.append(tensor[start : start + rope])
    return torch.cat(pieces)


def _stack_layers(per_layer: State, layers: int) -> State:
    """``decoder.layers.{i}.x`` of all layers to one ``decoder.layers.x`` of shape ``[L, ...]``."""
    out: State = {}
    for key, tensor in per_layer.items():
        if not key.startswith("decoder.layers."):
            out[key] = tensor
        elif key.startswith("decoder.layers.0."):
            rest = key.removeprefix("decoder.layers.0.")
            stack = [per_layer[f"decoder.layers.{layer}.{rest}"] for layer in range(layers)]
            out[f"decoder.layers.{rest}"] = torch.stack(stack)
    return out
