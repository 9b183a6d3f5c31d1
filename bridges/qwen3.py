"""Qwen3 (``qwen3``) and Qwen3-MoE (``qwen3_moe``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glmconv.bridge import Bridge
from glmconv.config import MAX_HEADS, MAX_LAYERS, ConfigReader, Shapes, check_experts, check_routing
from glmconv.evidence_config import ArgsReader
from glmconv.spec import ModelSpec, Moe, Rope
from mappings.qwen3 import DENSE_TABLE, MOE_TABLE


def _spec(
    reader: ConfigReader, model_type: str, ffn_size: int, moe: Moe | None, moe_layers: tuple[bool, ...]
) -> ModelSpec:
    heads = reader.natural("num_attention_heads", most=MAX_HEADS)
    groups = reader.natural("num_key_value_heads", most=MAX_HEADS)
    reader.divides(heads, groups, "num_attention_heads over num_key_value_heads")
    spec = ModelSpec(
        model_type=model_type,
        num_layers=reader.natural("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=reader.natural("hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=reader.natural("head_dim"),
        ffn_size=ffn_size,
        vocab_size=reader.natural("vocab_size"),
        norm_eps=reader.number("rms_norm_eps", positive=True),
        tied=reader.flag("tie_word_embeddings", False),
        rope=Rope(reader.rope_theta(), scaling=reader.rope_scaling()),
        max_positions=reader.natural("max_position_embeddings"),
        qkv_bias=reader.flag("attention_bias", False),
        qk_norm=True,
        moe=moe,
        moe_layers=moe_layers,
        dtype=reader.dtype(),
        raw=dict(reader.config),
    )
    reader.finish()
    return spec


def read_dense_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a Qwen3 config."""
    reader = ConfigReader(config)
    return _spec(reader, "qwen3", reader.natural("intermediate_size"), None, ())


def _moe_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """``mlp_only_layers`` and ``decoder_sparse_step`` choose the dense layers (transformers)."""
    step = reader.natural("decoder_sparse_step", default=1)
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        reader.problem("must be a list of layer numbers", "mlp_only_layers")
        dense = []
    layers = range(reader.natural("num_hidden_layers", most=MAX_LAYERS))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def read_moe_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a Qwen3-MoE config; ``shapes`` are the HF files' tensors where there are any."""
    reader = ConfigReader(config)
    moe_layers = _moe_layers(reader)
    experts = reader.natural("num_experts", "num_local_experts")
    check_experts(reader, shapes, "num_experts", experts, moe_layers)
    moe = Moe(
        num_experts=experts,
        ffn_size=reader.natural("moe_intermediate_size"),
        top_k=reader.natural("num_experts_per_tok"),
        normalise=reader.flag("norm_topk_prob", False),
    )
    check_routing(reader, moe)
    ffn_size = reader.natural("intermediate_size", default=6144)  # transformers' class
    return _spec(reader, "qwen3_moe", ffn_size, moe, moe_layers)


def dense_config_of(args: ArgsReader) -> dict[str, Any]:
    """A Qwen3 config from a trainer's args."""
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return named | args.common() | args.grouped_attention()


def moe_config_of(args: ArgsReader) -> dict[str, Any]:
    """A Qwen3-MoE config from a trainer's args."""
    named = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    layers = args.need(args.fields.moe_layers(), "moe_layer_freq") or ()
    return {
        **named,
        **args.common(),
        **args.grouped_attention(),
        "num_experts": args.need(args.fields.experts, "num_experts"),
        "num_experts_per_tok": args.natural("moe_router_topk"),
        "moe_intermediate_size": args.natural("moe_ffn_hidden_size"),
        # The softmax runs over the chosen experts, unless it is taken before the choice.
        "norm_topk_prob": args.flag("moe_router_pre_softmax") is False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_moe in enumerate(layers) if not is_moe],
    }


BRIDGES = {
    "qwen3": Bridge(
        "qwen3", DENSE_TABLE, read_dense_spec, ("Qwen3-0.6B … Qwen3-32B",), config_of=dense_config_of
    ),
    "qwen3_moe": Bridge(
        "qwen3_moe",
        MOE_TABLE,
        read_moe_spec,
        ("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
        config_of=moe_config_of,
    ),
}
