"""Raw ``config.json`` contents of the small test models, in the shape of the released files.

The keys are those of the releases (``rope_theta`` at top level for older families,
``rope_parameters`` for newer ones, the misleading ``head_dim`` of the MLA models), the numbers are
small. No two sizes that a mapping could confuse are equal: heads and groups, nope, rope and value
dims, hidden and ffn, latent ranks and experts all differ. Layers split over two pipeline stages,
heads, groups and experts over two ranks.
"""

from __future__ import annotations

from typing import Any

RawConfig = dict[str, Any]

MODELS = ("glm-5", "glm-5.2", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe")
SIZES = ("tiny", "small")
VOCAB = 384


def raw_config(model: str, size: str = "tiny", dtype: str = "bfloat16") -> RawConfig:
    """The ``config.json`` of a small model; ``dtype`` is a torch name. Raises ``ValueError``."""
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}, known: {', '.join(MODELS)}")
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}, known: {', '.join(SIZES)}")
    if model in ("glm-5", "glm-5.2"):
        config = _glm_moe_dsa(size)
        if model == "glm-5.2":
            config.update(_index_sharing(config, size))
    elif model in ("glm-4.5", "glm-4.5-air"):
        config = _glm4_moe(size, air=model == "glm-4.5-air")
    elif model == "qwen3-moe":
        config = _qwen3_moe(size)
    else:
        config = _qwen3(size, tied=model == "qwen3")
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return config


def _glm_moe_dsa(size: str) -> RawConfig:
    small = size == "small"
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [2, 3],
        "first_k_dense_replace": 1,
        # The value of the GLM-5 release, where it repeats the rope dim.
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 192 if small else 64,
        "index_head_dim": 16,
        "index_n_heads": 3,
        "index_topk": 8,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": 320 if small else 112,
        "kv_lora_rank": 24,
        "max_position_embeddings": 4096,
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 80 if small else 40,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 12 if small else 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6 if small else 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "q_lora_rank": 36,
        "qk_head_dim": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.0.2.dev0",
        "use_cache": True,
        "v_head_dim": 18,
        "vocab_size": VOCAB,
    }


def _index_sharing(config: RawConfig, size: str) -> RawConfig:
    """What GLM-5.2 adds to GLM-5: shared indexes, explicit layer lists, ``head_dim`` = nope dim.

    Tiny: owners 0, 1, 4, 7 of 8 (a stage may start at 4). Small: the released 4 and 3, owners
    0, 1, 2, 6, 10 of 12 (a stage may start at 6).
    """
    layers, dense, freq, offset = (12, 3, 4, 3) if size == "small" else (8, 2, 3, 2)
    owners = [max(layer - offset + 1, 0) % freq == 0 for layer in range(layers)]
    return {
        "first_k_dense_replace": dense,
        "head_dim": config["qk_nope_head_dim"],
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": offset,
        "index_topk_freq": freq,
        "index_topk_pattern": None,
        "indexer_types": ["full" if owner else "shared" for owner in owners],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "moe_router_dtype": "float32",
        "num_hidden_layers": layers,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "transformers_version": "5.12.0",
    }


def _glm4_moe(size: str, air: bool) -> RawConfig:
    small = size == "small"
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "eos_token_id": [2, 3],
        "head_dim": 20,
        "hidden_act": "silu",
        "hidden_size": 192 if small else 64,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
        "intermediate_size": 320 if small else 112,
        "max_position_embeddings": 4096,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 80 if small else 36,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 16 if small else (8 if air else 10),
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0 if air else 2.5,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1 if air else 2,
        "num_hidden_layers": 6 if small else 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": not air,
        "vocab_size": VOCAB,
    }


def _qwen3(size: str, tied: bool) -> RawConfig:
    small = size == "small"
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 192 if small else 64,
        "initializer_range": 0.02,
        "intermediate_size": 320 if small else 112,
        "max_position_embeddings": 4096,
        "max_window_layers": 4,
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_hidden_layers": 8 if small else 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def _qwen3_moe(size: str) -> RawConfig:
    config = _qwen3(size, tied=False)
    config.update(
        architectures=["Qwen3MoeForCausalLM"],
        decoder_sparse_step=1,
        head_dim=12,
        mlp_only_layers=[],
        model_type="qwen3_moe",
        moe_intermediate_size=80 if size == "small" else 40,
        norm_topk_prob=True,
        num_attention_heads=8,
        num_experts=16 if size == "small" else 6,
        num_experts_per_tok=2,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
    )
    return config
