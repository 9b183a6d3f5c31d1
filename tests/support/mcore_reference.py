"""Hand-written weights of a Megatron model from those of a transformers model, for the tests.

This is an independent reference: plain torch, one process, written from the layouts that
megatron-core's modules document, and sharing no code with ``glmconv``. Names are those of
``GPTModel.state_dict()`` at tensor parallel size 1; on the other side, those of transformers 5
in memory (stacked experts), with an MTP layer ``i`` as layer ``num_hidden_layers + i``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


def hf_to_megatron_state_dict(hf: State, config: dict[str, Any], dialect: str, *, num_mtp: int = 0) -> State:
    """The whole model. ``dialect``: ``mcore`` (0.19 and later) or ``mcore-0.18`` (0.16 to 0.18)."""
    layers = config["num_hidden_layers"]
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(layers):
        out |= _prefixed(f"decoder.layers.{layer}.", _layer(hf, config, layer, dialect))
    inner = "mtp_model_layer" if dialect == "mcore" else "transformer_layer"
    for index in range(num_mtp):
        source = f"model.layers.{layers + index}."
        prefix = f"mtp.layers.{index}."
        for name in ("enorm", "hnorm", "eh_proj"):
            out[f"{prefix}{name}.weight"] = hf[f"{source}{name}.weight"]
        out[f"{prefix}final_layernorm.weight"] = hf[f"{source}shared_head.norm.weight"]
        out |= _prefixed(f"{prefix}{inner}.", _layer(hf, config, layers + index, dialect))
    return {name: tensor.detach().clone() for name, tensor in out.items()}


def _prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def _layer(hf: State, config: dict[str, Any], layer: int, dialect: str) -> State:
    source = f"model.layers.{layer}."
    here = {name.removeprefix(source): tensor for name, tensor in hf.items() if name.startswith(source)}
    sparse = "mlp.gate.weight" in here
    norm = "pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"
    out = {norm: here["post_attention_layernorm.weight"]}
    out |= _latent_attention(here, config, dialect) if "kv_lora_rank" in config else _attention(here, config)
    return out | (_experts(here) if sparse else _mlp(here, "mlp.", "mlp."))


def _attention(here: State, config: dict[str, Any]) -> State:
    """Rows of ``linear_qkv``: for each group its query heads, its key head, its value head."""
    groups, size = config["num_key_value_heads"], config["head_dim"]
    repeat = config["num_attention_heads"] // groups
    out = {
        "self_attention.linear_qkv.layer_norm_weight": here["input_layernorm.weight"],
        "self_attention.linear_proj.weight": here["self_attn.o_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in here:
            continue
        q, k, v = (here[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
        rows = []
        for group in range(groups):
            rows.append(q[group * repeat * size : (group + 1) * repeat * size])
            rows.append(k[group * size : (group + 1) * size])
            rows.append(v[group * size : (group + 1) * size])
        out[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
    for name in ("q", "k"):
        if f"self_attn.{name}_norm.weight" in here:
            out[f"self_attention.{name}_layernorm.weight"] = here[f"self_attn.{name}_norm.weight"]
    return out


def _latent_attention(here: State, config: dict[str, Any], dialect: str) -> State:
    fused = dialect == "mcore-0.18"
    out = {
        "input_layernorm.weight": here["input_layernorm.weight"],
        "self_attention.linear_q_down_proj.weight": here["self_attn.q_a_proj.weight"],
        "self_attention.linear_q_up_proj.weight": here["self_attn.q_b_proj.weight"],
        "self_attention.linear_kv_down_proj.weight": here["self_attn.kv_a_proj_with_mqa.weight"],
        "self_attention.linear_kv_up_proj.weight": here["self_attn.kv_b_proj.weight"],
        "self_attention.linear_proj.weight": here["self_attn.o_proj.weight"],
        f"self_attention.{'linear_q_up_proj.layer_norm_weight' if fused else 'q_layernorm.weight'}": here[
            "self_attn.q_a_layernorm.weight"
        ],
        f"self_attention.{'linear_kv_up_proj.layer_norm_weight' if fused else 'kv_layernorm.weight'}": here[
            "self_attn.kv_a_layernorm.weight"
        ],
    }
    if "self_attn.indexer.wk.weight" not in here:
        return out
    rope, size = config["qk_rope_head_dim"], config["index_head_dim"]
    for mine, theirs in (
        ("linear_wq_b.weight", "wq_b.weight"),
        ("linear_wk.weight", "wk.weight"),
        ("k_norm.weight", "k_norm.weight"),
        ("k_norm.bias", "k_norm.bias"),
        ("linear_weights_proj.weight", "weights_proj.weight"),
    ):
        tensor = here[f"self_attn.indexer.{theirs}"]
        if fused and theirs != "weights_proj.weight":
            tensor = rope_channels_last(tensor, rope, size)
        out[f"self_attention.core_attention.indexer.{mine}"] = tensor
    return out


def rope_channels_last(tensor: Tensor, rope: int, size: int) -> Tensor:
    """Rows ``[rope | rest]`` of every index head become ``[rest | rope]``."""
    heads = [tensor[start : start + size] for start in range(0, tensor.shape[0], size)]
    return torch.cat([part for head in heads for part in (head[rope:], head[:rope])])


def _mlp(here: State, source: str, target: str) -> State:
    return {
        f"{target}linear_fc1.weight": torch.cat(
            [here[f"{source}gate_proj.weight"], here[f"{source}up_proj.weight"]]
        ),
        f"{target}linear_fc2.weight": here[f"{source}down_proj.weight"],
    }


def _experts(here: State) -> State:
    out = {"mlp.router.weight": here["mlp.gate.weight"]}
    if "mlp.gate.e_score_correction_bias" in here:
        out["mlp.router.expert_bias"] = here["mlp.gate.e_score_correction_bias"]
    if "mlp.shared_experts.gate_proj.weight" in here:
        out |= _mlp(here, "mlp.shared_experts.", "mlp.shared_experts.")
    gate_up, down = here["mlp.experts.gate_up_proj"], here["mlp.experts.down_proj"]
    for expert in range(gate_up.shape[0]):
        out[f"mlp.experts.local_experts.{expert}.linear_fc1.weight"] = gate_up[expert]
        out[f"mlp.experts.local_experts.{expert}.linear_fc2.weight"] = down[expert]
    return out
