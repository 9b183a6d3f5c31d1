"""Qwen3 (``qwen3``) and Qwen3-MoE (``qwen3_moe``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glmconv.tables.bridge import Bridge
from glmconv.tables.config import (
    MAX_HEADS,
    MAX_LAYERS,
    ConfigReader,
    Neutral,
    Shapes,
    check_experts,
    check_routing,
)
from glmconv.tables.config_from_args import ArgsReader
from glmconv.tables.spec import ModelSpec, Moe
from mappings.qwen3 import DENSE_TABLE, MOE_TABLE

NEUTRAL = {"use_qk_norm": Neutral((True,), "the family always norms q and k")}
MOE_NEUTRAL = NEUTRAL | {"n_shared_experts": Neutral((0,), "the Megatron model has no shared expert")}

WINDOW = 4096
FIRST_WINDOWED = 28
"""``sliding_window`` and ``max_window_layers`` where the config does not say (transformers' classes)."""


def _full_attention(reader: ConfigReader, num_layers: int, max_positions: int, dense: bool) -> None:
    """Remark on local attention that is switched on; the numbers of one that is off mean nothing.

    In a dense model layers from ``max_window_layers`` on, or those of ``layer_types``, are local; in one
    with experts all are, and transformers reads neither of the two.
    """
    on = reader.flag("use_sliding_window", False)
    null = "sliding_window" in reader.config and not reader.has("sliding_window")
    window = reader.natural("sliding_window", default=WINDOW) if on and not null else None
    local = list(range(num_layers))
    if dense:
        first = reader.natural("max_window_layers", default=FIRST_WINDOWED, least=0)
        kinds = reader.words("layer_types", num_layers, ("full_attention", "sliding_attention"))
        local = local[first:]
        if kinds is not None:
            if window is None and "sliding_attention" in kinds:
                reader.problem("has sliding_attention, but use_sliding_window is off", "layer_types")
            local = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    else:
        reader.alike("layer_types", ("full_attention",), "the family's attention is alike in all layers")
        reader.get("max_window_layers")
    if window is not None and window < max_positions and local:
        reader.changes_forward(
            "use_sliding_window",
            True,
            f"attention in {len(local)} of {num_layers} layers is over {window} tokens (sliding_window); "
            "the Megatron model attends to all",
        )


def _spec(
    reader: ConfigReader, model_type: str, ffn_size: int, moe: Moe | None, moe_layers: tuple[bool, ...]
) -> ModelSpec:
    heads = reader.natural("num_attention_heads", most=MAX_HEADS)
    groups = reader.natural("num_key_value_heads", most=MAX_HEADS)
    reader.divides(heads, groups, "num_attention_heads over num_key_value_heads")
    num_layers = reader.natural("num_hidden_layers", most=MAX_LAYERS)
    max_positions = reader.natural("max_position_embeddings")
    _full_attention(reader, num_layers, max_positions, dense=moe is None)
    spec = ModelSpec(
        model_type=model_type,
        num_layers=num_layers,
        hidden_size=reader.natural("hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=reader.natural("head_dim"),
        ffn_size=ffn_size,
        vocab_size=reader.natural("vocab_size"),
        norm_eps=reader.number("rms_norm_eps", positive=True),
        tied=reader.flag("tie_word_embeddings", False),
        rope=reader.rope(max_positions),
        max_positions=max_positions,
        qkv_bias=reader.flag("attention_bias", False),
        qk_norm=True,
        moe=moe,
        moe_layers=moe_layers,
        dtype=reader.dtype(),
        raw=dict(reader.config),
        remarks=reader.remarks(),
    )
    reader.finish()
    return spec


def read_dense_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a Qwen3 config."""
    reader = ConfigReader(config, neutral=NEUTRAL)
    return _spec(reader, "qwen3", reader.natural("intermediate_size"), None, ())


def _moe_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """``mlp_only_layers`` and ``decoder_sparse_step`` choose the dense layers (transformers)."""
    step = reader.natural("decoder_sparse_step", default=1)
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        reader.problem("must be a list of layer numbers", "mlp_only_layers")
        dense = []
    layers = range(reader.natural("num_hidden_layers", most=MAX_LAYERS))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def read_moe_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a Qwen3-MoE config; ``shapes`` are the HF files' tensors where there are any."""
    reader = ConfigReader(config, neutral=MOE_NEUTRAL)
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
