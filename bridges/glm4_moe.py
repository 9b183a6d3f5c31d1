"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7 (``glm4_moe``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glmconv.tables.bridge import Bridge
from glmconv.tables.config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_MTP_LAYERS,
    ConfigReader,
    Shapes,
    count_mtp_layers,
    sigmoid_experts,
)
from glmconv.tables.config_from_args import ArgsReader
from glmconv.tables.spec import ModelSpec
from mappings.glm4_moe import TABLE


def read_spec(config: Mapping[str, Any], shapes: Shapes) -> ModelSpec:
    """Validate a GLM-4.5 config; ``shapes`` are the HF files' tensors where there are any."""
    reader = ConfigReader(config)
    num_layers = reader.natural("num_hidden_layers", most=MAX_LAYERS)
    dense = reader.natural("first_k_dense_replace", least=0)
    moe_layers = tuple(layer >= dense for layer in range(num_layers))
    moe = sigmoid_experts(reader, shapes, moe_layers)
    heads = reader.natural("num_attention_heads", most=MAX_HEADS)
    groups = reader.natural("num_key_value_heads", most=MAX_HEADS)
    reader.divides(heads, groups, "num_attention_heads over num_key_value_heads")
    reader.alike("layer_types", ("full_attention",), "the family's attention is full in every layer")
    max_positions = reader.natural("max_position_embeddings")
    spec = ModelSpec(
        model_type="glm4_moe",
        num_layers=num_layers,
        hidden_size=reader.natural("hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=reader.natural("head_dim"),
        ffn_size=reader.natural("intermediate_size"),
        vocab_size=reader.natural("vocab_size"),
        norm_eps=reader.number("rms_norm_eps", positive=True),
        tied=reader.flag("tie_word_embeddings", False),
        rope=reader.rope(max_positions, partial=0.5),
        max_positions=max_positions,
        qkv_bias=reader.flag("attention_bias", False),
        qk_norm=reader.flag("use_qk_norm", False),
        moe=moe,
        moe_layers=moe_layers,
        num_mtp=reader.natural(
            "num_nextn_predict_layers",
            "num_mtp_layers",
            default=count_mtp_layers(shapes, num_layers),
            least=0,
            most=MAX_MTP_LAYERS,
        ),
        dtype=reader.dtype(),
        raw=dict(config),
        remarks=reader.remarks(),
    )
    reader.finish()
    return spec


def config_of(args: ArgsReader) -> dict[str, Any]:
    """A GLM-4.5 config from a trainer's args."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **args.common(),
        **args.grouped_attention(),
        **args.sigmoid_experts(),
        "partial_rotary_factor": args.number("rotary_percent"),
        "use_qk_norm": args.flag("qk_layernorm"),
    }


BRIDGES = {
    "glm4_moe": Bridge(
        model_type="glm4_moe",
        table=TABLE,
        spec=read_spec,
        titles=("GLM-4.5", "GLM-4.5-Air", "GLM-4.6", "GLM-4.7"),
        mtp_field="num_nextn_predict_layers",
        config_of=config_of,
    )
}
