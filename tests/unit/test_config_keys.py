"""Every key of ``config.json`` is read, known to be inert, or named: for each family, key by key."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.errors import DataError
from glmconv.checks.findings import CheckOptions
from glmconv.commands.check import check
from glmconv.commands.convert import RunOptions, convert
from glmconv.plan.planner import TargetOptions
from glmconv.tables.config_keys import FORWARD, INERT
from glmconv.tables.registry import get_bridge
from glmconv.tables.spec import ModelSpec
from tests.support.checkpoints import CONFIGS, MODELS, raw_config, real_config
from tests.support.plain import edit_json, plain

FAMILIES = ("glm-5", "glm-5.2", "glm-4.5", "qwen3", "qwen3-moe")
ONE_EACH = ("glm-5", "glm-4.5", "qwen3", "qwen3-moe")

READ = {
    "glm-5": {"rope_interleave", "topk_method"},
    "qwen3": {"use_sliding_window", "sliding_window"},
    "qwen3-moe": {"use_sliding_window", "sliding_window"},
    "glm-4.5": {"partial_rotary_factor"},
}
"""Keys of the shared ledger that a family's bridge reads, or whose odd values it judges elsewhere."""


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return get_bridge(config["model_type"]).spec(config, {})


def remarks(model: str, **changes: Any) -> list[tuple[str, str]]:
    """(kind, words) of each remark on the model's config with ``changes``."""
    found = spec_of(raw_config(model) | changes).remarks
    assert all(one.severity == "warning" for one in found)
    return [(one.kind, str(one)) for one in found]


def require_one(found: list[tuple[str, str]], kind: str, *words: str) -> None:
    assert [kind for kind, _ in found] == [kind]
    assert [word for word in words if word not in found[0][1]] == []


@pytest.mark.parametrize("model", [path.stem for path in sorted(CONFIGS.glob("*.json"))])
def test_a_released_config_gives_no_warning(model: str) -> None:
    assert spec_of(real_config(model)).remarks == ()


@pytest.mark.parametrize("model", MODELS)
def test_the_small_models_give_no_warning(model: str) -> None:
    assert remarks(model) == []


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("value", [1, True, 0.5, "x", [1], {"a": 1}])
def test_a_key_that_nothing_reads_is_named_with_its_value(model: str, value: Any) -> None:
    found = remarks(model, a_new_switch=value)
    require_one(found, "config-unread", '"a_new_switch"', f"= {value!r}", "not read by anything here")


@pytest.mark.parametrize("model", FAMILIES)
def test_a_null_says_nothing(model: str) -> None:
    assert remarks(model, a_new_switch=None) == []


def test_a_name_cannot_write_to_a_terminal() -> None:
    (_, words) = remarks("qwen3", **{"\x1b[2Jx": "\x1b[2J"})[0]
    assert "\x1b" not in words


@pytest.mark.parametrize("model", ONE_EACH)
@pytest.mark.parametrize("key", [key for keys in INERT.values() for key in keys if key != "model_type"])
def test_an_inert_key_may_say_anything(model: str, key: str) -> None:
    assert remarks(model, **{key: {"odd": [1, "x"]}}) == []


CHANGING: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_activation": "relu",
    "pruned_heads": {"0": [1]},
    "no_rope_layers": [1, 1, 1, 0],
    "rotary_pct": 0.25,
    "partial_rotary_factor": 0.5,
    "topk_method": "group_limited_greedy",
    "moe_layer_freq": 2,
    "moe_router_dtype": "bfloat16",
    "sliding_window": 8,
}
"""Values that change the forward pass; of the other keys ``True`` or 3 does."""


def _odd(key: str) -> Any:
    flags = all(isinstance(value, bool) for value in FORWARD[key].values) and FORWARD[key].values
    return CHANGING.get(key, True if flags else 3)


@pytest.mark.parametrize(
    ("model", "key"), [(model, key) for model in ONE_EACH for key in FORWARD if key not in READ[model]]
)
def test_a_key_that_changes_the_forward_pass_is_told_from_one_that_does_not(model: str, key: str) -> None:
    rule = FORWARD[key]
    for value in (*rule.values, None):
        # GLM-5's bridge refuses another frequency of expert layers by itself.
        assert remarks(model, **{key: value}) == []
    if (model, key) == ("glm-5", "moe_layer_freq"):
        with pytest.raises(DataError, match=key):
            remarks(model, **{key: _odd(key)})
        return
    found = remarks(model, **{key: _odd(key)})
    require_one(found, "config-unread" if rule.training else "config-forward", f'"{key}"', repr(_odd(key)))


@pytest.mark.parametrize("value", [1, "false", 0])
def test_a_flag_is_not_a_number(value: Any) -> None:
    require_one(remarks("qwen3", mlp_bias=value), "config-forward", '"mlp_bias"')


WINDOWS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, ""),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ""),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, ""),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, ""),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 4}, ""),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "3 of 4 layers"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "over 8 tokens"),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "2 of 4 layers",
    ),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}, "4 of 4 layers"),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, "4 of 4"),
    ("qwen3-moe", {"use_sliding_window": False, "sliding_window": 8}, ""),
    ("qwen3-moe", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
    ("glm-4.5", {"use_sliding_window": True}, "use_sliding_window"),
    ("glm-4.5", {"sliding_window": 8}, "sliding_window"),
    ("glm-4.5", {"layer_types": ["full_attention"] * 4}, ""),
    ("glm-4.5", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("glm-5", {"layer_types": ["indexed_attention"] * 4}, ""),
    ("glm-5", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
]


@pytest.mark.parametrize(("model", "changes", "words"), WINDOWS)
def test_a_window_counts_where_transformers_would_use_it(
    model: str, changes: dict[str, Any], words: str
) -> None:
    found = remarks(model, **changes)
    if words:
        require_one(found, "config-forward", words)
    else:
        assert found == []


def test_a_window_is_judged_by_the_defaults_of_transformers() -> None:
    """A window of 4096 from layer 28 on, where the config only switches it on."""
    config = real_config("qwen3-0.6b") | {"use_sliding_window": True, "num_hidden_layers": 30}
    config = {
        key: value for key, value in config.items() if key not in ("sliding_window", "max_window_layers")
    }
    (found,) = spec_of(config).remarks
    assert "in 2 of 30 layers is over 4096 tokens" in str(found)


def test_layers_of_a_kind_that_is_switched_off_are_refused() -> None:
    with pytest.raises(DataError, match="use_sliding_window is off"):
        remarks("qwen3", layer_types=["sliding_attention"] * 4)


SCALINGS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
    {"rope_type": "a-new-one"},
]


@pytest.mark.parametrize("model", ONE_EACH)
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: str(one.get("rope_type", one.get("type"))))
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_scaling_is_named_with_its_kind(model: str, scaling: dict[str, Any], name: str) -> None:
    """But for YaRN in latent attention, which megatron-core has."""
    changes: dict[str, Any] = {"rope_scaling": None, "rope_parameters": None, "rope_theta": 1000000}
    changes[name] = scaling
    found = remarks(model, **changes)
    kind = scaling.get("rope_type") or scaling["type"]
    if (model, kind) == ("glm-5", "yarn"):
        assert found == []
    else:
        require_one(found, "config-forward", f'"{name}"', kind)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"attention_factor": 1.2}, "config-forward", "rope_parameters.attention_factor"),
        ({"truncate": False}, "config-forward", "rope_parameters.truncate"),
        ({"truncate": True, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 1.0}, "", ""),
        ({"mscale": 0.7}, "config-forward", "rope_parameters.mscale"),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, "", ""),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, "config-forward", "megatron-core by 1"),
        ({"mscale_all_dim": 0.7}, "config-forward", "transformers scales the rotary"),
        ({"mrope_section": [1]}, "config-unread", "rope_parameters.mrope_section"),
    ],
)
def test_yarn_of_latent_attention_is_looked_into(more: dict[str, Any], kind: str, words: str) -> None:
    found = remarks("glm-5", rope_parameters=YARN | more)
    if kind:
        require_one(found, kind, words)
    else:
        assert found == []


ODD = [-1, -1.0, "x", "", True, [], [1], {}, {"a": 1}, 10**400, 1e308, float("nan"), 0]


@pytest.mark.parametrize("model", ONE_EACH)
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_end_in_words(model: str, value: Any) -> None:
    """Whatever stands in a rope's block or in a key of the ledger: a spec, or all defects by name."""
    inner = ("factor", "mscale", "mscale_all_dim", "rope_type", "type", "beta_fast", "truncate", "x")
    keys = (*FORWARD, "layer_types", "max_window_layers", "index_topk_pattern", "rope_scaling", "text_config")
    changes = [{"rope_theta": 1e6, "rope_parameters": YARN | {"factor": 1e30, key: value}} for key in inner]
    changes += [{key: value, "use_sliding_window": True} for key in keys]
    changes += [{"original_max_position_embeddings": value, "rope_theta": 1e6, "rope_parameters": YARN}]
    for one in changes:
        with suppress(DataError):
            remarks(model, **one)


def test_yarn_starts_from_the_length_that_transformers_takes() -> None:
    spec = spec_of(raw_config("glm-5") | {"rope_parameters": YARN})
    assert spec.rope.scaling["original_max_position_embeddings"] == spec.max_positions
    outer = {"rope_parameters": YARN, "original_max_position_embeddings": 512}
    assert spec_of(raw_config("glm-5") | outer).rope.scaling["original_max_position_embeddings"] == 512


@pytest.mark.parametrize("model", ONE_EACH)
def test_what_stands_beside_an_unscaled_rope_is_named(model: str) -> None:
    block = {"rope_theta": 1000000, "rope_type": "default", "factor": 2.0}
    found = remarks(model, rope_theta=None, rope_scaling=None, rope_parameters=block)
    require_one(found, "config-unread", "rope_parameters.factor", "not scaled")


@pytest.mark.parametrize("model", ONE_EACH)
def test_a_rope_of_one_kind_of_layers_is_named(model: str) -> None:
    block = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_type": "linear", "factor": 2}}
    found = remarks(model, rope_theta=1000000, rope_scaling=None, rope_parameters=block)
    assert [kind for kind, _ in found] == ["config-forward"] * 2
    assert "rope_parameters.full_attention" in found[0][1]
    assert "rope_parameters.sliding_attention" in found[1][1]


@pytest.mark.parametrize("model", ONE_EACH)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": "default"}, "must be an object"),
        ({"rope_scaling": [1]}, "must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1000000}},
            "transformers takes rope_scaling alone",
        ),
        (
            {
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
            },
            "contradict",
        ),
    ],
)
def test_ropes_that_contradict_are_refused(model: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        remarks(model, **changes)


@pytest.mark.parametrize("model", ["glm-5", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_share_that_rotates_is_named_where_the_family_rotates_whole_heads(model: str, nested: bool) -> None:
    block = {"rope_theta": 1000000, "partial_rotary_factor": 0.5}
    changes = {"rope_parameters": block, "rope_theta": None} if nested else {"partial_rotary_factor": 0.5}
    require_one(remarks(model, **changes), "config-forward", "partial_rotary_factor", "whole heads")


def test_latent_attention_has_no_groups() -> None:
    require_one(remarks("glm-5", num_key_value_heads=2), "config-forward", '"num_key_value_heads" (= 2)')


@pytest.mark.parametrize("key", ["rope_interleave", "indexer_rope_interleave"])
def test_what_transformers_ignores_is_said(key: str) -> None:
    require_one(remarks("glm-5", **{key: False}), "config-forward", f'"{key}"', "transformers ignores it")


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("glm-4.5", {"norm_topk_prob": False}, "always normalises"),
        ("glm-5", {"norm_topk_prob": False}, "always normalises"),
        ("glm-4.5", {"num_experts_per_tok": 1}, "single expert"),
        ("glm-4.5", {"n_group": 2, "topk_group": 2}, "the best 1 scores of a group"),
        ("glm-4.5", {"n_group": 2, "topk_group": 1}, ""),
        ("qwen3-moe", {"norm_topk_prob": False}, ""),
    ],
)
def test_routers_that_part_are_named(model: str, changes: dict[str, Any], words: str) -> None:
    found = remarks(model, **changes)
    if words:
        require_one(found, "config-forward", words)
    else:
        assert found == []


def test_the_model_inside_a_composed_config_is_looked_into() -> None:
    raw = raw_config("qwen3")
    inner = {"hidden_size": raw["hidden_size"], "hidden_act": "gelu", "a_new_switch": 2, "use_cache": False}
    found = remarks("qwen3", text_config=inner)
    assert [kind for kind, _ in found] == ["config-forward", "config-unread"]
    assert "text_config.hidden_act" in found[0][1]
    assert "text_config.a_new_switch" in found[1][1]


LETTERS = "FFSSFSSF"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (LETTERS, ""),
        (["full" if letter == "F" else "shared" for letter in LETTERS], ""),
        (list(LETTERS), "transformers takes every entry"),
        (["full"] * 7 + [3], "index_topk_pattern"),
        ("FFSSFSSX", "8 letters F or S"),
    ],
)
def test_a_pattern_of_indexers_is_read_as_transformers_reads_it(pattern: Any, words: str) -> None:
    config = raw_config("glm-5.2") | {"indexer_types": None, "index_topk_pattern": pattern}
    if words:
        with pytest.raises(DataError, match=words):
            spec_of(config)
    else:
        assert spec_of(config).dsa == spec_of(raw_config("glm-5.2")).dsa


def test_a_pattern_that_contradicts_the_listed_types_is_refused() -> None:
    with pytest.raises(DataError, match="contradicts indexer_types"):
        remarks("glm-5.2", index_topk_pattern="F" * 8)


@pytest.mark.parametrize("model", ONE_EACH)
def test_convert_and_check_say_it_in_both_directions(model: str, tmp_path: Path) -> None:
    hf = plain(model, a_new_switch=3, hidden_act="gelu").write(tmp_path / "hf")
    kinds = ["config-forward", "config-unread"]

    def named(warnings: list[Any]) -> list[str]:
        return sorted(one.kind for one in warnings if one.kind.startswith("config"))

    assert named(check(hf, CheckOptions()).warnings) == kinds
    report = convert(hf, tmp_path / "mcore", target=TargetOptions(to="megatron"))
    assert named(report.warnings) == kinds
    assert named(check(report.path, CheckOptions()).warnings) == kinds
    back = convert(
        report.path, tmp_path / "back", target=TargetOptions(to="hf"), run=RunOptions(dry_run=True)
    )
    assert named(back.warnings) == kinds


def test_the_command_line_prints_each_key(tmp_path: Path) -> None:
    hf = plain("qwen3").write(tmp_path / "hf")
    edit_json(hf / "config.json", lambda config: config.update(use_sliding_window=True, sliding_window=8))
    edit_json(hf / "config.json", lambda config: config.update(max_window_layers=0, a_new_switch=1))
    command = [sys.executable, "-m", "glmconv", "convert", str(hf), str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    warnings = " ".join(json.loads(done.stdout)["warnings"])
    assert '"use_sliding_window" (= True)' in warnings
    assert '"a_new_switch" (= 1)' in warnings
    checked = subprocess.run(
        [sys.executable, "-m", "glmconv", "check", str(hf)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0
    assert "use_sliding_window" in checked.stdout + checked.stderr
