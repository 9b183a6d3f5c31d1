"""A ``ModelSpec`` as megatron-core's ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glmconv.basics.errors import UsageError
from glmconv.tables.config_fields import CHANGES_FORWARD
from glmconv.tables.spec import ModelSpec, Moe
from glmconv.verify.mcore.align import INDEXER_NORM_EPSILON
from glmconv.verify.mcore.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    import torch

PRECISIONS = ("fp32", "bf16")


def runtime_dialect() -> str:
    """The dialect of checkpoints that the installed megatron-core runs."""
    return "mcore" if "dsa_indexer_rope_interleaved" in config_fields() else "mcore-0.18"


def config_fields() -> frozenset[str]:
    """The fields that the installed megatron-core's MLA and GPT config knows."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return frozenset(MLATransformerConfig.__dataclass_fields__)


def shares_indexes(spec: ModelSpec) -> bool:
    """Whether some decoder layer reuses the token selection of an earlier one."""
    return spec.dsa is not None and not all(spec.dsa.full)


def transformer_config(
    spec: ModelSpec,
    *,
    precision: str = "fp32",
    parallel: Parallel = SINGLE,
    index_topk: int | None = None,
    layer_keys: str = "auto",
    mtp: bool = True,
) -> Any:
    """The ``MLATransformerConfig`` (with MLA) or ``TransformerConfig`` of ``spec``.

    ``index_topk`` lowers the indexer's selection so that a short text is sparse.
    ``layer_keys`` is how an all-MoE or all-dense model is saved: ``stacked`` (also ``auto``),
    or ``per-layer`` as trainers that give ``moe_layer_freq`` as a list; a model of both kinds
    is always per layer. ``mtp=False`` leaves the MTP layers out.

    Raises ``UsageError`` for what the installed megatron-core cannot run, and for what ``spec``
    remarks that no config of its carries.
    """
    require_carried(spec)
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}", hint=f"one of {', '.join(PRECISIONS)}")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    fields = _common(spec, dtype, parallel)
    fields |= _mla(spec) if spec.mla is not None else _grouped_query(spec)
    if spec.moe is not None:
        fields |= _experts(spec, spec.moe, layer_keys)
    if spec.dsa is not None:
        fields |= _indexer(spec, index_topk)
    if spec.num_mtp and mtp:
        fields["mtp_num_layers"] = spec.num_mtp
    return (MLATransformerConfig if spec.mla is not None else TransformerConfig)(**fields)


def _common(spec: ModelSpec, dtype: torch.dtype, parallel: Parallel) -> dict[str, Any]:
    import torch
    from torch.nn import functional

    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "activation_func": functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Every weight comes from a checkpoint; initialising full-width experts takes minutes.
        "perform_initialization": False,
        "transformer_impl": "transformer_engine",
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
        # Needed by megatron-core's absorbed MLA and what trainers run with experts.
        "sequence_parallel": parallel.tp > 1,
    }


def require_carried(*specs: ModelSpec) -> None:
    """Raise UsageError naming each config key that changes the forward pass and is not carried to Megatron.

    Models built without it would differ, or agree although neither computes what the config says.
    """
    remarks = {str(one): one for spec in specs for one in spec.remarks if one.kind == CHANGES_FORWARD}
    if remarks:
        raise UsageError(
            "the config says what the Megatron model cannot be told, so running both proves nothing",
            where=specs[0].model_type,
            defects=list(remarks.values()),
            hint="to compare the weights alone, take the keys out of config.json in a copy of both sides",
        )


def _grouped_query(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_query_groups": spec.num_groups,
        "kv_channels": spec.head_dim,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "rotary_interleaved": spec.rope.interleaved,
    }


def _mla(spec: ModelSpec) -> dict[str, Any]:
    mla = spec.mla
    if mla is None:
        raise UsageError("a model without MLA has no MLA config", where=spec.model_type)
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "kv_channels": mla.v_head_dim,
        "qk_layernorm": True,
        "rotary_base": spec.rope.theta,
        "rotary_percent": spec.rope.partial_factor,
        **_mla_rope(spec.rope.scaling),
    }


YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""YaRN's numbers in a Hugging Face config, and as fields of ``MLATransformerConfig``."""


def _mla_rope(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN is the one scaling of latent attention; a bridge remarks on all others."""
    # The softmax scale of MLA reads these under every rope type; 1 and 0 leave it alone.
    plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if not scaling:
        return plain
    return {"rope_type": "yarn"} | {name: scaling[key] for key, name in YARN.items() if key in scaling}


def _experts(spec: ModelSpec, moe: Moe, layer_keys: str) -> dict[str, Any]:
    """Routing and experts. A list of layers makes megatron-core save layer by layer."""
    pattern = [int(spec.is_moe(layer)) for layer in range(spec.num_layers)]
    stacked = all(pattern) and layer_keys != "per-layer"
    if layer_keys == "stacked" and not stacked:
        raise UsageError("only a model whose layers are all alike has stacked keys", where=spec.model_type)
    groups = {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.top_k_groups}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": 1 if stacked else pattern,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score_function,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_pre_softmax": not moe.normalise,
        "moe_router_topk_scaling_factor": None if moe.scaling == 1.0 else moe.scaling,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # alltoall creates a CUDA stream; grouped products need CUDA kernels.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    } | (groups if moe.num_groups > 1 else {})


def _indexer(spec: ModelSpec, index_topk: int | None) -> dict[str, Any]:
    """The indexer's options, each only where this megatron-core has it."""
    dsa = spec.dsa
    if dsa is None:
        raise UsageError("a model without indexer has no indexer config", where=spec.model_type)
    known = config_fields()
    shares = shares_indexes(spec)
    if shares and "dsa_indexer_topk_freq" not in known:
        raise UsageError(
            "index sharing needs megatron-core >= 0.19",
            where=spec.model_type,
            hint="pip install 'megatron-core>=0.19' (Python >= 3.12)",
        )
    if shares and spec.dsa is not None and _schedule(spec.num_layers, dsa.freq, dsa.offset) != dsa.full:
        raise UsageError(
            f"megatron-core only knows schedules of freq and offset; {dsa.freq} and {dsa.offset} "
            "do not give the layers that own an indexer",
            where=spec.model_type,
        )
    wanted = {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": dsa.num_heads,
        "dsa_indexer_head_dim": dsa.head_dim,
        "dsa_indexer_topk": index_topk or dsa.top_k,
        "dsa_indexer_topk_freq": dsa.freq if shares else 1,
        "dsa_indexer_skip_topk_offset": dsa.offset if shares else 0,
        "dsa_indexer_rope_interleaved": dsa.rope_interleave,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": INDEXER_NORM_EPSILON,
        "dsa_indexer_loss_coeff": 0.0,
    }
    return {key: value for key, value in wanted.items() if key in known}


def _schedule(num_layers: int, freq: int, offset: int) -> tuple[bool, ...]:
    """The layers that megatron-core builds an indexer in: 1-based n with (n - offset) % freq == 0."""
    first = max(offset, 1)
    return tuple(max(layer + 1 - first, 0) % freq == 0 for layer in range(num_layers))
