"""The way back of the hand-written reference: on-disk Megatron tensors to hub names.

Written on its own, not derived from the way there. It must never import ``mappings``, ``bridges`` or
``glmconv``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_config import Config, State, check, has_qk_norm, indexer_is_swapped, mtp_layers


def megatron_to_hf(state: State, config: Config, dialect: str, *, duplicates: bool | None = None) -> State:
    """Hub tensors of an on-disk Megatron state, stacked or per layer, padded vocabulary or not.

    ``duplicates`` writes the copies that an MTP layer keeps of embedding and head; by default
    ``glm4_moe`` has them. Router biases stay fp32. Raises ``KeyError`` and ``ValueError``.
    """
    check(config, dialect)
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    left = _unstack_layers(state, layers)
    hf: State = {}
    hf["model.embed_tokens.weight"] = left.pop("embedding.word_embeddings.weight")[:vocab]
    hf["model.norm.weight"] = left.pop("decoder.final_layernorm.weight")
    if not config["tie_word_embeddings"]:
        hf["lm_head.weight"] = left.pop("output_layer.weight")[:vocab]

    for layer in range(layers):
        _block_to_hf(left, hf, (f"decoder.layers.{layer}.", f"model.layers.{layer}."), config, dialect)
    for index in range(mtp_layers(config)):
        source, target = f"mtp.layers.{index}.", f"model.layers.{layers + index}."
        hf[target + "enorm.weight"] = left.pop(source + "enorm.weight")
        hf[target + "hnorm.weight"] = left.pop(source + "hnorm.weight")
        hf[target + "eh_proj.weight"] = left.pop(source + "eh_proj.weight")
        hf[target + "shared_head.norm.weight"] = left.pop(source + "final_layernorm.weight")
        _block_to_hf(left, hf, (source + "transformer_layer.", target), config, dialect)
        if config["model_type"] == "glm4_moe" if duplicates is None else duplicates:
            hf[target + "embed_tokens.weight"] = hf["model.embed_tokens.weight"]
            hf[target + "shared_head.head.weight"] = hf["lm_head.weight"]
    if left:
        raise ValueError(f"left over: {sorted(left)[:5]} and {max(len(left) - 5, 0)} more")
    return hf


def _unstack_layers(state: State, layers: int) -> State:
    out: State = {}
    for key, tensor in state.items():
        rest = key.removeprefix("decoder.layers.")
        if rest == key or rest.split(".")[0].isdigit():
            out[key] = tensor
            continue
        if tensor.shape[0] != layers:
            raise ValueError(f"{key} stacks {tensor.shape[0]} layers, the config has {layers}")
        for layer in range(layers):
            out[f"decoder.layers.{layer}.{rest}"] = tensor[layer]
    return out


def _block_to_hf(left: State, hf: State, where: tuple[str, str], config: Config, dialect: str) -> None:
    """One layer, from the prefix ``where[0]`` to the prefix ``where[1]``."""
    source, target = where
    attention = source + "self_attention."
    if config["model_type"] == "glm_moe_dsa":
        hf[target + "input_layernorm.weight"] = left.pop(source + "input_layernorm.weight")
        _latent_attention_to_hf(left, hf, (attention, target + "self_attn."), config, dialect)
    else:
        hf[target + "input_layernorm.weight"] = left.pop(attention + "linear_qkv.layer_norm_weight")
        _grouped_attention_to_hf(left, hf, attention, target + "self_attn.", config)

    if source + "mlp.linear_fc1.weight" in left:
        hf[target + "post_attention_layernorm.weight"] = left.pop(source + "mlp.linear_fc1.layer_norm_weight")
        _gated_to_hf(hf, target + "mlp.", left.pop(source + "mlp.linear_fc1.weight"))
        hf[target + "mlp.down_proj.weight"] = left.pop(source + "mlp.linear_fc2.weight")
        return
    hf[target + "post_attention_layernorm.weight"] = left.pop(source + "pre_mlp_layernorm.weight")
    hf[target + "mlp.gate.weight"] = left.pop(source + "mlp.router.weight")
    if config["model_type"] != "qwen3_moe":
        hf[target + "mlp.gate.e_score_correction_bias"] = left.pop(source + "mlp.router.expert_bias")
        shared = source + "mlp.shared_experts."
        _gated_to_hf(hf, target + "mlp.shared_experts.", left.pop(shared + "linear_fc1.weight"))
        hf[target + "mlp.shared_experts.down_proj.weight"] = left.pop(shared + "linear_fc2.weight")
    first = left.pop(source + "mlp.experts.experts.linear_fc1.weight")
    second = left.pop(source + "mlp.experts.experts.linear_fc2.weight")
    for expert in range(first.shape[0]):
        _gated_to_hf(hf, f"{target}mlp.experts.{expert}.", first[expert])
        hf[f"{target}mlp.experts.{expert}.down_proj.weight"] = second[expert]


def _gated_to_hf(hf: State, target: str, fused: Tensor) -> None:
    """``fused`` ``[2F, H]`` holds the gate's rows, then up's."""
    half = fused.shape[0] // 2
    hf[target + "gate_proj.weight"] = fused[:half]
    hf[target + "up_proj.weight"] = fused[half:]


def _latent_attention_to_hf(
    left: State, hf: State, where: tuple[str, str], config: Config, dialect: str
) -> None:
    source, target = where
    hf[target + "q_a_proj.weight"] = left.pop(source + "linear_q_down_proj.weight")
    hf[target + "q_b_proj.weight"] = left.pop(source + "linear_q_up_proj.weight")
    hf[target + "kv_a_proj_with_mqa.weight"] = left.pop(source + "linear_kv_down_proj.weight")
    hf[target + "kv_b_proj.weight"] = left.pop(source + "linear_kv_up_proj.weight")
    hf[target + "o_proj.weight"] = left.pop(source + "linear_proj.weight")
    separate = dialect == "mcore"
    q_norm = "q_layernorm.weight" if separate else "linear_q_up_proj.layer_norm_weight"
    kv_norm = "kv_layernorm.weight" if separate else "linear_kv_up_proj.layer_norm_weight"
    hf[target + "q_a_layernorm.weight"] = left.pop(source + q_norm)
    hf[target + "kv_a_layernorm.weight"] = left.pop(source + kv_norm)

    flat = dialect in ("slime", "miles")
    indexer = source if flat else source + "core_attention.indexer."
    linear = indexer if flat else indexer + "linear_"
    if linear + "wk.weight" not in left:
        return
    hf[target + "indexer.weights_proj.weight"] = left.pop(linear + "weights_proj.weight")
    moved = {
        "indexer.wq_b.weight": left.pop(linear + "wq_b.weight"),
        "indexer.wk.weight": left.pop(linear + "wk.weight"),
        "indexer.k_norm.weight": left.pop(indexer + "k_norm.weight"),
        "indexer.k_norm.bias": left.pop(indexer + "k_norm.bias"),
    }
    for name, tensor in moved.items():
        swapped = indexer_is_swapped(config, dialect)
        hf[target + name] = _rope_to_the_front(tensor, config) if swapped else tensor


def _rope_to_the_front(tensor: Tensor, config: Config) -> Tensor:
    dim, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    by_head = torch.unflatten(tensor, 0, (-1, dim))
    return torch.cat([by_head[:, dim - rope :], by_head[:, : dim - rope]], dim=1).flatten(0, 1)


def _grouped_attention_to_hf(left: State, hf: State, source: str, target: str, config: Config) -> None:
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    per_group = heads // groups
    for kind in ("weight", "bias"):
        if source + f"linear_qkv.{kind}" not in left:
            continue
        fused = left.pop(source + f"linear_qkv.{kind}")
        by_group = torch.unflatten(fused, 0, (groups, per_group + 2, dim))
        hf[target + f"q_proj.{kind}"] = by_group[:, :per_group].flatten(0, 2)
        hf[target + f"k_proj.{kind}"] = by_group[:, per_group].flatten(0, 1)
        hf[target + f"v_proj.{kind}"] = by_group[:, per_group + 1].flatten(0, 1)
    hf[target + "o_proj.weight"] = left.pop(source + "linear_proj.weight")
    if has_qk_norm(config):
        hf[target + "q_norm.weight"] = left.pop(source + "q_layernorm.weight")
        hf[target + "k_norm.weight"] = left.pop(source + "k_layernorm.weight")


def hub_to_stacked(hf: State) -> State:
    """transformers 5 in memory: ``mlp.experts.gate_up_proj`` ``[E, 2F, H]``, ``down_proj`` ``[E, H, F]``.

    Every layer that has experts is stacked, MTP layers too.
    """
    out: State = {}
    experts: dict[str, dict[int, State]] = {}
    for name, tensor in hf.items():
        prefix, found, rest = name.partition(".mlp.experts.")
        if not found:
            out[name] = tensor
            continue
        number, projection, _ = rest.split(".")
        experts.setdefault(prefix, {}).setdefault(int(number), {})[projection] = tensor
    for prefix, by_number in experts.items():
        ordered = [by_number[number] for number in range(len(by_number))]
        gate_up = [torch.cat([expert["gate_proj"], expert["up_proj"]]) for expert in ordered]
        out[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{prefix}.mlp.experts.down_proj"] = torch.stack([expert["down_proj"] for expert in ordered])
    return out
