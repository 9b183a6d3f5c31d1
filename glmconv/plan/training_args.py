"""The ``args`` of a Megatron checkpoint: what trainers compare, take over or build a model from.

Sources, read in August 2026:

* MLM: Megatron-LM, megatron/training/checkpointing.py: ``check_checkpoint_args``,
  ``load_args_from_checkpoint``, ``load_checkpoint``.
* MB: Megatron-Bridge, src/megatron/bridge/training: mlm_compat/arguments.py
  (``_transformer_config_from_args`` takes every field of ``TransformerConfig`` that args has, and
  some by name), mlm_compat/model.py (``_gpt_provider``), checkpointing.py.
* slime, miles: tools/convert_torch_dist_to_hf.py reads ``args`` from ``common.pt`` and cuts the
  tensors by it, and reads any other field as if it were there; scripts/models hold the arguments
  that their runs are started with.

So ``args`` carries every field that the parsers define (``parser_defaults``) and those below.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from glmconv.basics.dtypes import BY_LABEL, BY_TORCH_NAME, DType
from glmconv.plan.parser_defaults import parser_defaults
from glmconv.tables.rope_args import rope_args, unsaid_rope
from glmconv.tables.spec import Dsa, Mla, ModelSpec, Moe


def args_namespace(
    spec: ModelSpec, *, padded_vocab_size: int, per_layer: bool = False, dtype: DType | None = None
) -> Namespace:
    """The arguments that a trainer of this model would have been started with.

    ``padded_vocab_size``: rows of the embedding as stored. ``per_layer``: layers are stored one by
    one, so the pattern of MoE layers is given as a list even where all are. ``dtype``: that of the
    weights as stored; without it, what the config says.
    """
    values = parser_defaults()
    values |= _shape(spec) | _vocabulary(spec, padded_vocab_size) | _attention(spec)
    values |= _moe(spec.moe, spec, per_layer) | _mla(spec.mla) | rope_args(spec) | _dsa(spec.dsa)
    return Namespace(**(values | _run(dtype or _said(spec))))


def unsaid(spec: ModelSpec, dialect: str) -> list[str]:
    """What of the model the arguments of a dialect's trainers cannot say, each by name."""
    found, moe, dsa = unsaid_rope(spec, dialect), spec.moe, spec.dsa
    if moe is not None and moe.score_function == "sigmoid" and not moe.normalise and moe.top_k > 1:
        found.append("norm_topk_prob false: Megatron's router divides chosen sigmoid scores by their sum")
    if moe is not None and moe.num_groups > 1 and moe.top_k != 2 * moe.top_k_groups:
        # megatron-core, transformer/moe/moe_utils.py, group_limited_topk.
        found.append(
            f"n_group {moe.num_groups}: Megatron ranks a group by its best {moe.top_k // moe.top_k_groups} "
            "experts, transformers by its best 2"
        )
    if dsa is not None and not dsa.rope_interleave and dialect in ("mcore-0.18", "slime"):
        found.append("indexer_rope_interleave false: the dialect's indexer rotates interleaved pairs")
    return found


def _said(spec: ModelSpec) -> DType:
    """The dtype that the config says."""
    return BY_TORCH_NAME.get(spec.dtype) or BY_LABEL.get(spec.dtype, DType.BF16)


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return {
        # MLM check_checkpoint_args compares these three without a default. slime, miles: num_layers.
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        # MLM load_args_from_checkpoint.
        "ffn_hidden_size": spec.ffn_size,
        "max_position_embeddings": spec.max_positions,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "mtp_num_layers": spec.num_mtp or None,
        "spec": None,
        "heterogeneous_layers_config_path": None,
        "heterogeneous_layers_config_encoded_json": None,
        "hybrid_layer_pattern": None,
        # MB _transformer_config_from_args; the first by the name of TransformerConfig.
        "layernorm_epsilon": spec.norm_eps,
        "norm_epsilon": spec.norm_eps,
        "is_hybrid_model": False,
        "no_persist_layer_norm": False,
        "bias_swiglu_fusion": True,
        "bias_gelu_fusion": False,
        "init_method_xavier_uniform": False,
    }


def _vocabulary(spec: ModelSpec, padded: int) -> dict[str, Any]:
    return {
        # MLM check_checkpoint_args, where the run has a vocabulary file.
        "make_vocab_size_divisible_by": 1 if padded == spec.vocab_size else 128,
        "tokenizer_type": "HuggingFaceTokenizer",
        # MLM load_args_from_checkpoint, MB _gpt_provider.
        "padded_vocab_size": padded,
        "untie_embeddings_and_output_weights": not spec.tied,
        # slime, miles: removing the padding on the way to HF.
        "vocab_size": spec.vocab_size,
    }


def _attention(spec: ModelSpec) -> dict[str, Any]:
    grouped = spec.mla is None and spec.num_groups != spec.num_heads
    return {
        # MLM load_args_from_checkpoint; slime and miles cut QKV by the first three.
        "num_query_groups": spec.num_groups if spec.mla is None else spec.num_heads,
        "kv_channels": spec.head_dim if spec.mla is None else spec.mla.qk_nope_head_dim,
        "group_query_attention": grouped,
        "add_qkv_bias": spec.qkv_bias,
        # No runtime builds anything from it, but MLM check_checkpoint_args compares it in a run
        # without --finetune: slime's and miles' scripts pass --no-position-embedding for models with
        # a sparse-attention indexer and for almost no others.
        "add_position_embedding": spec.dsa is None,
        "use_rotary_position_embeddings": False,
        # megatron-core's latent attention interleaves by itself, whatever this says.
        "rotary_interleaved": spec.rope.interleaved and spec.mla is None,
        # MB _get_transformer_layer_spec and _gpt_provider.
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "qk_l2_norm": False,
        "fp16_lm_cross_entropy": False,
        "transformer_impl": "transformer_engine",
    }


def _moe(moe: Moe | None, spec: ModelSpec, per_layer: bool) -> dict[str, Any]:
    if moe is None:
        return {"num_experts": None, "moe_grouped_gemm": False, "moe_layer_freq": 1}
    mixed = per_layer or not all(spec.moe_layers)
    return {
        # MLM load_args_from_checkpoint; slime and miles cut experts by the first.
        "num_experts": moe.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in spec.moe_layers] if mixed else 1,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_router_topk": moe.top_k,
        # A softmax over all experts whose chosen scores are not normalised again is taken first.
        "moe_router_pre_softmax": moe.score_function != "softmax" or not moe.normalise,
        "moe_grouped_gemm": True,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_token_dispatcher_type": "alltoall",
        # MB: fields of TransformerConfig.
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.top_k_groups if moe.num_groups > 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_gate": moe.shared_gate,
    }


def _mla(mla: Mla | None) -> dict[str, Any]:
    # MB _transformer_config_from_args reads the first without a default; the others are fields of
    # MLATransformerConfig. slime's exporter asks whether q_lora_rank is None.
    if mla is None:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _dsa(dsa: Dsa | None) -> dict[str, Any]:
    if dsa is None:
        return {"experimental_attention_variant": None, "indexer_rope_interleave": False}
    return {
        # MB _gpt_provider, then fields of TransformerConfig (the last five from 0.19 on).
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": dsa.num_heads,
        "dsa_indexer_head_dim": dsa.head_dim,
        "dsa_indexer_topk": dsa.top_k,
        "dsa_indexer_topk_freq": dsa.freq,
        "dsa_indexer_skip_topk_offset": dsa.offset,
        "dsa_indexer_rope_interleaved": dsa.rope_interleave,
        # miles' exporter orders the indexer by it; miles fills it in from config.json.
        "indexer_rope_interleave": dsa.rope_interleave,
        # As transformers' indexer: its k_norm's own epsilon, and no Hadamard step.
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rotate_activation": False,
    }


def _run(dtype: DType) -> dict[str, Any]:
    """What a run had beside its model: nothing was trained, nothing is sharded."""
    return {
        # MLM check_checkpoint_args, load_args_from_checkpoint (--use-mp-args-from-checkpoint-args) and
        # load_checkpoint; MB _extract_megatron_lm_args_from_state_dict.
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "data_parallel_random_init": False,
        "ckpt_format": "torch_dist",
        "ckpt_fully_parallel_save": False,
        # There is neither in the checkpoint: without these a resume asks for them.
        "no_save_optim": True,
        "no_save_rng": True,
        # MLM load_checkpoint, MB _get_train_state_from_state_dict.
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        # MB _transformer_config_from_args reads the rest without a default.
        "params_dtype": dtype,
        "bf16": dtype is DType.BF16,
        "fp16": dtype is DType.F16,
        "overlap_p2p_comm": False,
        # Fused kernels need packages (and apply_rope_fusion yarn, with latent attention); off is always
        # right, and MB takes them from args.
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "fp8_param_gather": False,
        "config_logger_dir": "",
        "cp_comm_type": ["p2p"],
    }
