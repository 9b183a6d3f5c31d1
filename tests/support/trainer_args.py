"""Arguments of public training runs, and what a run fills in before it saves them.

The values are those of slime 624b824a, scripts/models (miles 31f1ca96 has the same); ``filled`` does
what Megatron-LM's ``validate_args`` and slime's defaults do to fields that the script leaves out.
"""

from __future__ import annotations

from typing import Any

from glmconv.basics.dtypes import DType
from glmconv.plan.parser_defaults import parser_defaults

_DENSE = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "rotary_base": 1_000_000,
    "kv_channels": 128,
    "group_query_attention": True,
}
_SIGMOID = {
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_topk": 8,
    "moe_aux_loss_coeff": 0,
}
_GLM4 = {
    **_DENSE,
    **_SIGMOID,
    "add_qkv_bias": True,
    "num_attention_heads": 96,
    "num_query_groups": 8,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 151552,
}
_GLM5 = {
    **_SIGMOID,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "spec": ["slime_plugins.models.glm5.glm5", "get_glm5_spec"],
    "num_experts": 256,
    "moe_layer_freq": [0] * 3 + [1] * 75,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk_scaling_factor": 2.5,
    "num_layers": 78,
    "hidden_size": 6144,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 64,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "add_position_embedding": False,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_head_dim": 192,
    "v_head_dim": 256,
    "kv_channels": 192,
    "qk_pos_emb_head_dim": 64,
    "vocab_size": 154880,
}
PUBLIC_RUNS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_DENSE,
        "num_layers": 28,
        "hidden_size": 1024,
        "ffn_hidden_size": 3072,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "use_rotary_position_embeddings": True,
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        **_DENSE,
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "position_embedding_type": "rope",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 151936,
        "num_experts": 128,
        "moe_ffn_hidden_size": 768,
        "moe_router_score_function": "softmax",
        "moe_router_topk": 8,
        "moe_layer_freq": [1] * 48,
    },
    "glm-4.5-air": {
        **_GLM4,
        "num_layers": 46,
        "hidden_size": 4096,
        "ffn_hidden_size": 10944,
        "num_experts": 128,
        "moe_layer_freq": [0] + [1] * 45,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 1408,
    },
    "glm-4.5": {
        **_GLM4,
        "num_layers": 92,
        "hidden_size": 5120,
        "ffn_hidden_size": 12288,
        "qk_layernorm": True,
        "num_experts": 160,
        "moe_layer_freq": [0] * 3 + [1] * 89,
        "moe_ffn_hidden_size": 1536,
        "moe_shared_expert_intermediate_size": 1536,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "glm-5": {**_GLM5, "rotary_base": 1_000_000},
    "glm-5.2": {**_GLM5, "rotary_base": 8_000_000},
}
"""Model (a file of tests/data/configs) to the options of its launch script."""


def filled(options: dict[str, Any]) -> dict[str, Any]:
    """The whole ``args`` that such a run saves."""
    args = parser_defaults() | options
    args["rope_type"] = "yarn" if args["multi_latent_attention"] else "rope"
    if args["use_rotary_position_embeddings"]:
        args["position_embedding_type"] = "rope"
    args["seq_length"] = args["max_position_embeddings"] = 4096
    args["padded_vocab_size"] = -(-args["vocab_size"] // 1024) * 1024
    args |= {"params_dtype": DType.BF16, "bf16": True, "ckpt_format": "torch_dist"}
    return args
