"""Names of the objects that trainers expect beside the weights."""

from __future__ import annotations

import pytest

from glmconv.formats.torchdist.extra_state import extra_state_names


@pytest.mark.parametrize(
    ("tensor", "shape", "names"),
    [
        (
            "decoder.layers.3.self_attention.linear_qkv.weight",
            (96, 64),
            ["decoder.layers.3.self_attention.linear_qkv._extra_state/shard_0_1"],
        ),
        (
            "decoder.layers.self_attention.linear_qkv.weight",
            (2, 96, 64),
            [
                "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2",
                "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2",
            ],
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            (2, 64, 32),
            [
                "decoder.layers.3.mlp.experts.experts.linear_fc1._extra_state/shard_0_2",
                "decoder.layers.3.mlp.experts.experts.linear_fc1._extra_state/shard_1_2",
            ],
        ),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            (2, 1, 32, 64),
            [
                "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.0_2.1",
                "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.0_2.1",
            ],
        ),
        (
            "decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight",
            (64, 32),
            ["decoder.layers.3.mlp.experts.experts.7.linear_fc1._extra_state/shard_0_1"],
        ),
        (
            "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
            (64,),
            ["mtp.layers.0.transformer_layer.pre_mlp_layernorm._extra_state/shard_0_1"],
        ),
        (
            "decoder.layers.0.self_attention.in_proj.weight.query",
            (8, 8),
            ["decoder.layers.0.self_attention.in_proj._extra_state/shard_0_1"],
        ),
        ("decoder.final_layernorm.weight", (64,), ["decoder.final_layernorm._extra_state/shard_0_1"]),
        ("decoder.layers.3.mlp.router.weight", (8, 64), []),
        ("decoder.layers.3.mlp.router.expert_bias", (8,), []),
        ("embedding.word_embeddings.weight", (100, 64), []),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", (1, 64), []),
        ("decoder.layers.3.self_attention.A_log", (8,), []),
    ],
)
def test_a_module_with_a_weight_has_an_object_for_each_layer_and_expert(
    tensor: str, shape: tuple[int, ...], names: list[str]
) -> None:
    assert extra_state_names({tensor: shape}) == names


def test_several_tensors_of_a_module_share_its_objects() -> None:
    module = "decoder.layers.0.self_attention.linear_qkv"
    tensors = {f"{module}.weight": (96, 64), f"{module}.bias": (96,), f"{module}.layer_norm_weight": (64,)}
    assert extra_state_names(tensors) == [f"{module}._extra_state/shard_0_1"]
