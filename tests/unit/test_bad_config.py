"""``config.json`` that is missing something, contradicts itself, or contradicts the files."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.glm_moe_dsa import _express as express
from glmconv.basics.errors import DataError, UsageError
from glmconv.commands.convert import convert, plan_conversion
from glmconv.source.source import SourceOptions
from glmconv.tables.registry import get_bridge
from tests.support.checkpoints import raw_config, real_config
from tests.support.plain import Plain, plain, refused

CONFIGS = {model: raw_config(model) for model in ("glm-5", "glm-5.2", "glm-4.5", "qwen3", "qwen3-moe")}

EVERY: tuple[str, ...] = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
EVERY += ("num_attention_heads",)
MOE = ("moe_intermediate_size", "num_experts_per_tok")
GROUPED = ("num_key_value_heads", "head_dim", "intermediate_size", "rope_theta")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NEEDED = {
    "glm-5": EVERY
    + MOE
    + LATENT
    + ("index_n_heads", "index_head_dim", "index_topk", "intermediate_size", "n_routed_experts"),
    "glm-4.5": EVERY + MOE + GROUPED + ("first_k_dense_replace", "n_routed_experts"),
    "qwen3": EVERY + GROUPED,
    "qwen3-moe": (*EVERY, *MOE, "num_key_value_heads", "head_dim", "rope_theta", "num_experts"),
}


def spec_of(config: dict[str, Any], made: Plain | None = None) -> Any:
    """What the family's bridge makes of a config (and of a checkpoint's shapes)."""
    shapes = {name: tensor.shape for name, tensor in made.tensors.items()} if made else {}
    return get_bridge(config["model_type"]).spec(config, shapes)


def complaint(config: dict[str, Any], made: Plain | None = None) -> str:
    with pytest.raises(DataError) as caught:
        spec_of(config, made)
    assert caught.value.exit_code == 1
    return str(caught.value)


@pytest.mark.parametrize(("model", "field"), [(model, field) for model in NEEDED for field in NEEDED[model]])
def test_missing_field_is_named(model: str, field: str) -> None:
    config = {name: value for name, value in CONFIGS[model].items() if name != field}
    message = complaint(config)
    assert f"config.json: {field}" in message
    assert "missing" in message


@pytest.mark.parametrize(("model", "field"), [(model, field) for model in NEEDED for field in NEEDED[model]])
@pytest.mark.parametrize("value", ["12", -1, 10**400, [1], float("nan"), False])
def test_odd_value_is_named(model: str, field: str, value: Any) -> None:
    message = complaint(CONFIGS[model] | {field: value})
    assert f"config.json: {field}" in message
    assert "must be" in message


def test_all_faults_of_a_config_are_listed_at_once() -> None:
    config = CONFIGS["glm-5"] | {"hidden_size": None, "q_lora_rank": 0, "tie_word_embeddings": "no"}
    message = complaint(config)
    assert all(
        f"config.json: {field}" in message for field in ("hidden_size", "q_lora_rank", "tie_word_embeddings")
    )
    assert "compare with the released config" in message


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("glm-5", {"num_experts": 7}, ("n_routed_experts and num_experts", "contradict")),
        ("qwen3-moe", {"num_local_experts": 7}, ("num_experts and num_local_experts", "contradict")),
        ("glm-5", {"qk_head_dim": 21}, ("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim = 20")),
        ("glm-5", {"attention_bias": True}, ("attention_bias", "has no bias")),
        ("glm-5", {"moe_layer_freq": 2}, ("moe_layer_freq",)),
        ("glm-5", {"scoring_func": "softmax"}, ("scoring_func", "sigmoid")),
        ("glm-5", {"num_experts_per_tok": 7}, ("num_experts_per_tok", "chooses 7 of 6 experts")),
        ("glm-5", {"n_group": 4}, ("n_group", "6 is not a multiple of 4")),
        ("glm-5", {"topk_group": 2}, ("topk_group", "chooses 2 of 1 groups")),
        ("glm-5", {"index_head_dim": 8}, ("index_head_dim", "larger than qk_rope_head_dim 8")),
        ("glm-5.2", {"first_k_dense_replace": 1}, ("first_k_dense_replace", "contradicts mlp_layer_types")),
        ("glm-5.2", {"mlp_layer_types": ["dense"] * 7}, ("mlp_layer_types", "7 entries for 8 layers")),
        ("glm-5.2", {"mlp_layer_types": ["moe"] * 8}, ("mlp_layer_types", "must be a list of")),
        ("glm-4.5", {"num_key_value_heads": 4}, ("6 is not a multiple of 4",)),
        ("qwen3", {"num_key_value_heads": 4}, ("6 is not a multiple of 4",)),
        ("qwen3", {"rope_parameters": {"rope_theta": 5.0}}, ("rope_theta", "contradict")),
        ("qwen3", {"rope_theta": 0}, ("rope_theta", "positive")),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": float("inf")}},
            ("rope_scaling.factor", "finite"),
        ),
        (
            "glm-4.5",
            {"partial_rotary_factor": "half"},
            ("partial_rotary_factor", "must be a positive number"),
        ),
        (
            "glm-4.5",
            {"rope_parameters": {"partial_rotary_factor": "half"}},
            ("rope_parameters.partial_rotary_factor", "must be a positive number"),
        ),
        ("qwen3", {"dtype": "float32"}, ("dtype and torch_dtype", "contradict")),
        ("qwen3", {"torch_dtype": "bfloat17"}, ("torch_dtype", "is not a dtype of torch")),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, ("mlp_only_layers", "layer numbers")),
        ("qwen3-moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step",)),
    ],
)
def test_contradiction(model: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = complaint(CONFIGS[model] | changes)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk_freq": 4}, ("indexer_types", "give another schedule", "make them agree")),
        ({"index_skip_topk_offset": 1}, ("indexer_types", "give another schedule")),
        ({"indexer_types": ["full"] * 7}, ("indexer_types", "7 entries for 8 layers")),
        ({"indexer_types": ["full"] * 7 + ["none"]}, ("indexer_types", "must be a list of")),
        ({"indexer_types": None, "index_topk_pattern": "FFSF"}, ("index_topk_pattern", "8 letters F or S")),
        ({"indexer_types": None, "index_topk_pattern": [["F"]] * 8}, ("index_topk_pattern", "8 letters")),
        ({"indexer_types": None, "index_skip_topk_offset": 0}, ("the first layer has no earlier index",)),
        (
            {
                "indexer_types": ["full", "shared", "full", "full", "shared", "full", "full", "full"],
                "index_topk_freq": None,
            },
            ("indexer_types", "no frequency and offset give this schedule"),
        ),
        (
            {"indexer_types": ["shared"] + ["full"] * 7, "index_topk_freq": None},
            ("indexer_types", "no frequency and offset"),
        ),
    ],
)
def test_schedule_of_indexers(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = complaint(CONFIGS["glm-5.2"] | changes)
    assert [word for word in words if word not in message] == []


def test_listed_schedules_are_expressed_as_a_search_over_all_frequencies_would() -> None:
    """Megatron reads frequency and offset: the pair must give the list, and the smallest one is taken."""

    def owners(layers: int, freq: int, offset: int) -> tuple[bool, ...]:
        return tuple(max(layer + 1 - offset, 0) % freq == 0 for layer in range(layers))

    for layers in range(1, 10):
        pairs = [(freq, offset) for freq in range(1, layers + 1) for offset in range(1, layers + 1)]
        known = {owners(layers, *pair): pair for pair in reversed(pairs)}
        for full in product((True, False), repeat=layers):
            assert express(full) == known.get(full)


def test_schedule_that_contradicts_the_files(tmp_path: Path) -> None:
    made = plain("glm-5.2")
    made.config.update(indexer_types=None, index_topk_freq=1)
    refused(
        made.write(tmp_path / "hf"), tmp_path / "out", DataError, "model.layers.2.self_attn.indexer.wk.weight"
    )


class TestHeadDim:
    """GLM-5.2's config says ``head_dim`` 192 while the rope has 64 rows; some tools believe it."""

    def test_misleading_head_dim_is_not_read(self, tmp_path: Path) -> None:
        assert real_config("glm-5.2")["head_dim"] == 192
        sizes: dict[str, Any] = {
            "head_dim": 192,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 12,
            "qk_head_dim": 76,
        }
        made = plain("glm-5.2", **sizes, index_head_dim=128)
        src = made.write(tmp_path / "hf")
        report = convert(src, tmp_path / "out")
        assert report.ledger.used_bytes == sum(len(tensor.data) for tensor in made.tensors.values())
        assert plan_conversion(src).source.spec.mla.qk_rope_head_dim == 64  # type: ignore[union-attr]

    def test_rope_overwritten_by_head_dim_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        sizes: dict[str, Any] = {
            "head_dim": 192,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 12,
            "qk_head_dim": 76,
        }
        made = plain("glm-5.2", **sizes, index_head_dim=256)
        made.config.update(qk_rope_head_dim=192, qk_head_dim=204)
        words = (
            "qk_rope_head_dim",
            "is 192, but kv_a_proj_with_mqa has 88 rows",
            "= 64",
            "overwrite it with head_dim",
        )
        refused(made.write(tmp_path / "hf"), tmp_path / "out", DataError, *words)


class TestModelType:
    @pytest.mark.parametrize("named", ["llama", "", "GLM_MOE_DSA", "../glm4_moe"])
    def test_unknown_one_names_the_known(self, tmp_path: Path, named: str) -> None:
        made = plain("qwen3")
        made.config["model_type"] = named
        message = refused(
            made.write(tmp_path / "hf"), tmp_path / "out", DataError, f"model_type {named!r}", "known:"
        )
        assert "glm4_moe" in message

    def test_near_miss_is_suggested(self, tmp_path: Path) -> None:
        made = plain("qwen3")
        made.config["model_type"] = "qwen3moe"
        refused(made.write(tmp_path / "hf"), tmp_path / "out", DataError, "did you mean 'qwen3_moe'?")

    @pytest.mark.parametrize("value", [None, 3, ["qwen3"]])
    def test_missing(self, tmp_path: Path, value: Any) -> None:
        made = plain("qwen3")
        made.config["model_type"] = value
        refused(made.write(tmp_path / "hf"), tmp_path / "out", DataError, "has no model_type", "config.json")

    def test_given_one_that_is_another(self, tmp_path: Path) -> None:
        src = plain("qwen3").write(tmp_path / "hf")
        options = SourceOptions(model_type="glm_moe_dsa")
        words = ("--model-type glm_moe_dsa", "config.json says 'qwen3'")
        refused(src, tmp_path / "out", UsageError, *words, source=options)


class TestText:
    @pytest.mark.parametrize(
        ("text", "word"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"\xff\xfe{}", "not JSON"),
            (b"[]", "not a JSON object"),
            (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nests deeper"),
            (b"[" * 100_000, "not JSON"),
            (b'{"model_type": "qwen3", "model_type": "glm4_moe"}', "twice"),
        ],
    )
    def test_file_that_is_no_config(self, tmp_path: Path, text: bytes, word: str) -> None:
        src = plain("qwen3").write(tmp_path / "hf")
        (src / "config.json").write_bytes(text)
        refused(src, tmp_path / "out", DataError, "config.json", word)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("glm-5", {"num_hidden_layers": 1 << 39}),
        ("glm-5", {"num_nextn_predict_layers": 1 << 39}),
        ("glm-5", {"n_routed_experts": 1 << 39}),
        ("glm-5", {"num_hidden_layers": 4000, "n_routed_experts": 4000}),
        ("glm-5", {"index_n_heads": 1 << 39}),
        ("glm-4.5", {"num_attention_heads": 1 << 39, "num_key_value_heads": 1 << 39}),
        ("qwen3", {"num_hidden_layers": 1 << 39}),
        ("qwen3-moe", {"num_experts": 1 << 39}),
    ],
)
def test_absurd_sizes_are_refused_before_any_work(model: str, changes: dict[str, Any]) -> None:
    began = time.monotonic()
    complaint(CONFIGS[model] | changes)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("model", CONFIGS)
def test_sound_configs_are_taken(model: str) -> None:
    assert spec_of(CONFIGS[model], plain(model)).raw["model_type"] == CONFIGS[model]["model_type"]


VALUES = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


@given(data=st.data())
def test_any_value_in_any_field_is_understood_or_refused(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(sorted(CONFIGS)))
    config = json.loads(json.dumps(CONFIGS[model]))
    for field in data.draw(
        st.lists(st.sampled_from(sorted(set(config) - {"model_type"})), min_size=1, max_size=3)
    ):
        config[field] = data.draw(TREES)
    with suppress(DataError):
        spec_of(config)
