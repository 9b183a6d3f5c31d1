"""The hand-written reference itself: both directions, and the row formulas that it must follow."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import MODELS, ROOT, raw_config, tiny_tensors
from tests.support.reference import (
    DIALECTS,
    default_layer_keys,
    hf_to_megatron,
    hub_to_stacked,
    megatron_to_hf,
)

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def hf_of() -> dict[str, tuple[State, dict[str, Any]]]:
    return {model: (tiny_tensors(model), raw_config(model)) for model in MODELS}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", MODELS)
def test_there_and_back_is_the_identity(hf_of: dict[str, Any], model: str, dialect: str) -> None:
    hf, config = hf_of[model]
    for layer_keys in (None, "per-layer") if model.startswith("glm") else ("stacked", "per-layer"):
        back = megatron_to_hf(hf_to_megatron(hf, config, dialect, layer_keys), config, dialect)
        assert set(back) == set(hf)
        assert all(torch.equal(back[name], hf[name]) and back[name].dtype == hf[name].dtype for name in hf)


def test_qkv_rows_follow_the_formula(hf_of: dict[str, Any]) -> None:
    """q(h, d), k(g, d) and v(g, d) lie where Megatron's attention reads them."""
    hf, config = hf_of["glm-4.5"]
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    ratio = heads // groups
    state = hf_to_megatron(hf, config, "mcore")
    for kind in ("weight", "bias"):
        fused = state[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
        query, key, value = (hf[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        assert fused.shape[0] == (heads + 2 * groups) * dim
        for d in range(dim):
            for head in range(heads):
                row = (head // ratio) * (ratio + 2) * dim + (head % ratio) * dim + d
                assert torch.equal(fused[row], query[head * dim + d])
            for group in range(groups):
                start = group * (ratio + 2) * dim + ratio * dim + d
                assert torch.equal(fused[start], key[group * dim + d])
                assert torch.equal(fused[start + dim], value[group * dim + d])


def test_experts_are_stacked_gate_before_up(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["qwen3-moe"]
    state = hf_to_megatron(hf, config, "mcore")
    first, second = (state[f"decoder.layers.mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"]
    assert first.shape == (4, 6, 2 * ffn, hidden)
    assert second.shape == (4, 6, hidden, ffn)
    prefix = "model.layers.3.mlp.experts.5."
    assert torch.equal(first[3, 5, :ffn], hf[prefix + "gate_proj.weight"])
    assert torch.equal(first[3, 5, ffn:], hf[prefix + "up_proj.weight"])
    assert torch.equal(second[3, 5], hf[prefix + "down_proj.weight"])


@pytest.mark.parametrize(
    ("dialect", "interleave", "swapped"),
    [
        ("mcore", True, False),
        ("mcore-0.18", True, True),
        ("slime", True, True),
        ("slime", False, True),
        ("miles", True, True),
        ("miles", False, False),
    ],
)
def test_the_indexer_swaps_where_the_runtime_wants_rope_last(
    hf_of: dict[str, Any], dialect: str, interleave: bool, swapped: bool
) -> None:
    hf, config = hf_of["glm-5.2"]
    state = hf_to_megatron(hf, config | {"indexer_rope_interleave": interleave}, dialect)
    flat = dialect in ("slime", "miles")
    prefix = "decoder.layers.4.self_attention." + ("" if flat else "core_attention.indexer.")
    linear = prefix if flat else prefix + "linear_"
    source = "model.layers.4.self_attn.indexer."
    dim, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    for head in range(config["index_n_heads"]):
        for channel in range(dim):
            there = head * dim + ((channel - rope) % dim if swapped else channel)
            query = state[linear + "wq_b.weight"][there]
            assert torch.equal(query, hf[source + "wq_b.weight"][head * dim + channel])
            if head == 0:
                for ours, theirs in ((linear + "wk.weight", "wk.weight"),):
                    assert torch.equal(state[ours][there], hf[source + theirs][channel])
                for kind in ("k_norm.weight", "k_norm.bias"):
                    assert torch.equal(state[prefix + kind][there], hf[source + kind][channel])
    assert torch.equal(state[linear + "weights_proj.weight"], hf[source + "weights_proj.weight"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_latent_norms_are_separate_in_mcore_alone(hf_of: dict[str, Any], dialect: str) -> None:
    hf, config = hf_of["glm-5"]
    state = hf_to_megatron(hf, config, dialect)
    fused = "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"
    separate = "decoder.layers.0.self_attention.kv_layernorm.weight"
    assert (separate in state, fused in state) == (dialect == "mcore", dialect != "mcore")


def test_a_bf16_router_bias_is_widened_and_a_router_weight_is_not(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["glm-5"]
    narrow = {name: tensor.bfloat16() for name, tensor in hf.items()}
    state = hf_to_megatron(narrow, config, "mcore")
    assert state["decoder.layers.2.mlp.router.expert_bias"].dtype == torch.float32
    assert state["decoder.layers.2.mlp.router.weight"].dtype == torch.bfloat16


def test_layers_are_stacked_as_trainers_of_the_dialect_do() -> None:
    expected = {"qwen3": ("stacked", "stacked"), "qwen3-moe": ("stacked", "per-layer")}
    for model in MODELS:
        config = raw_config(model)
        keys = default_layer_keys(config, "mcore"), default_layer_keys(config, "slime")
        assert keys == expected.get(model.removesuffix("-untied"), ("per-layer", "per-layer"))


def test_padding_of_the_vocabulary_is_cut(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["qwen3-untied"]
    state = hf_to_megatron(hf, config, "mcore")
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[key] = torch.cat([state[key], torch.zeros(128, config["hidden_size"])])
    back = megatron_to_hf(state, config, "mcore")
    assert back["lm_head.weight"].shape == hf["lm_head.weight"].shape


def test_copies_that_differ_are_refused(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["glm-4.5"]
    broken = dict(hf) | {"model.layers.4.embed_tokens.weight": hf["lm_head.weight"]}
    with pytest.raises(ValueError, match="differs from the tensor it repeats"):
        hf_to_megatron(broken, config, "mcore")
    tied, config = hf_of["qwen3"]
    with pytest.raises(ValueError, match="tied"):
        hf_to_megatron(tied | {"lm_head.weight": -tied["model.embed_tokens.weight"]}, config, "mcore")


def test_left_over_and_missing_tensors_are_refused(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["qwen3"]
    with pytest.raises(ValueError, match=r"left over: .*surprise"):
        hf_to_megatron(hf | {"surprise": hf["model.norm.weight"]}, config, "mcore")
    with pytest.raises(KeyError, match=r"o_proj"):
        hf_to_megatron({k: v for k, v in hf.items() if "layers.2.self_attn.o_proj" not in k}, config, "mcore")


def test_hub_to_stacked_is_what_transformers_holds_in_memory(hf_of: dict[str, Any]) -> None:
    hf, config = hf_of["glm-5"]
    stacked = hub_to_stacked(hf)
    ffn = config["moe_intermediate_size"]
    fused = stacked["model.layers.4.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[2, ffn:], hf["model.layers.4.mlp.experts.2.up_proj.weight"])
    assert not any(".experts.0." in name for name in stacked)


def test_the_oracle_never_looks_at_what_it_judges() -> None:
    for name in ("reference", "reference_config", "reference_export"):
        tree = ast.parse((ROOT / "tests" / "support" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not any(m.split(".")[0] in ("glmconv", "mappings", "bridges") for m in modules)
