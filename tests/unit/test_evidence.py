"""What a trainer wrote down about its model is compared with the config that steers a conversion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.checks.findings import CheckOptions
from glmconv.commands.check import check
from glmconv.commands.convert import convert, plan_conversion
from glmconv.commands.inspect import inspect
from glmconv.formats.torchdist.common import read_common, write_common
from glmconv.plan.planner import TargetOptions
from glmconv.plan.training_args import args_namespace
from glmconv.source.evidence import compare, findings, says_router_bias, says_tied
from glmconv.source.evidence_claims import CLAIMS
from glmconv.source.manifest import read_manifest
from glmconv.source.source import SourceOptions
from glmconv.tables.registry import get_bridge
from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import Fields
from tests.support.checkpoints import load_config, load_tensors, raw_config, real_config
from tests.support.trainer_args import PUBLIC_RUNS, filled

MODELS = ("qwen3", "qwen3-untied", "qwen3-moe", "glm-4.5-air", "glm-4.5", "glm-5", "glm-5.2")


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return get_bridge(config["model_type"]).spec(config, {})


def contradictions(args: dict[str, Any], spec: ModelSpec, *, strict: bool = False) -> list[Defect]:
    return findings(compare([Fields(args, "args")], spec), strict=strict)


@pytest.mark.parametrize("model", PUBLIC_RUNS)
def test_the_args_of_public_runs_agree_with_the_released_configs(model: str) -> None:
    spec = spec_of(real_config(model))
    compared = compare([Fields(filled(PUBLIC_RUNS[model]))], spec)
    assert [one for one in compared if not one.agrees] == []
    assert len(compared) >= 15


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("padded", [0, 61])
def test_the_args_that_we_write_agree_with_the_config(model: str, padded: int) -> None:
    spec = spec_of(raw_config(model))
    rows = spec.vocab_size + padded
    assert contradictions(vars(args_namespace(spec, padded_vocab_size=rows)), spec) == []


@pytest.mark.parametrize("model", PUBLIC_RUNS)
def test_parser_defaults_alone_make_no_claim_about_parts_that_are_off(model: str) -> None:
    """Fields of MoE, latent attention and indexers hold defaults in every run that has none of them."""
    args = filled(PUBLIC_RUNS[model])
    assert ("moe_router_topk" in {one.name for one in compared(args, model)}) == bool(args["num_experts"])
    latent = {"kv_lora_rank", "qk_head_dim", "v_head_dim", "q_lora_rank"}
    said = {one.name for one in compared(args, model)}
    assert (latent <= said) if args["multi_latent_attention"] else not latent & said
    assert not any(name.startswith("dsa_") for name in said)


def compared(args: dict[str, Any], model: str) -> list[Any]:
    return compare([Fields(args)], spec_of(real_config(model)))


ROWS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"num_layers": 5}),
    ("qwen3", {"hidden_size": 65}),
    ("qwen3", {"num_attention_heads": 2}),
    ("qwen3", {"num_query_groups": 4}),
    ("qwen3", {"kv_channels": 8}),
    ("qwen3", {"ffn_hidden_size": 8}),
    ("qwen3", {"vocab_size": 10**6}),
    ("qwen3", {"padded_vocab_size": 1}),
    ("qwen3", {"untie_embeddings_and_output_weights": True}),
    ("qwen3-untied", {"untie_embeddings_and_output_weights": False}),
    ("qwen3", {"add_bias_linear": True}),
    ("qwen3", {"add_qkv_bias": True}),
    ("qwen3", {"qk_layernorm": False}),
    ("qwen3", {"swiglu": False}),
    ("qwen3", {"layernorm_zero_centered_gamma": True}),
    ("qwen3", {"multi_latent_attention": True}),
    ("qwen3", {"num_experts": 8}),
    ("qwen3-moe", {"num_experts": 2}),
    ("qwen3-moe", {"moe_layer_freq": [0, 1, 1, 1]}),
    ("qwen3-moe", {"moe_layer_freq": 2}),
    ("qwen3-moe", {"moe_ffn_hidden_size": 8}),
    ("glm-4.5", {"moe_shared_expert_intermediate_size": 8}),
    ("glm-4.5", {"mtp_num_layers": 3}),
    ("glm-4.5", {"group_query_attention": False}),
    ("glm-5", {"q_lora_rank": 3}),
    ("glm-5", {"kv_lora_rank": 3}),
    ("glm-5", {"qk_head_dim": 3}),
    ("glm-5", {"qk_pos_emb_head_dim": 3}),
    ("glm-5", {"v_head_dim": 3}),
    ("glm-5", {"dsa_indexer_n_heads": 5}),
    ("glm-5", {"dsa_indexer_head_dim": 3}),
    ("glm-5", {"indexer_rope_interleave": False}),
    ("glm-5.2", {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 3}),
]
FORWARD: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"rotary_base": 10_000}),
    ("qwen3", {"rotary_percent": 0.25}),
    ("qwen3", {"rotary_interleaved": True}),
    ("qwen3", {"layernorm_epsilon": 1e-3}),
    ("qwen3", {"normalization": "LayerNorm"}),
    ("qwen3", {"window_size": [4095, 0]}),
    ("qwen3", {"use_rope_scaling": True}),
    ("qwen3", {"rotary_seq_len_interpolation_factor": 4}),
    ("qwen3", {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}),
    ("qwen3-moe", {"moe_router_topk": 1}),
    ("qwen3-moe", {"moe_router_score_function": "sigmoid"}),
    ("qwen3-moe", {"moe_router_enable_expert_bias": True}),
    ("glm-4.5", {"moe_router_topk_scaling_factor": 9.0}),
    ("glm-4.5", {"moe_router_topk_scaling_factor": None}),
    ("glm-4.5", {"moe_router_num_groups": 2}),
    ("glm-4.5", {"moe_router_enable_expert_bias": False}),
    ("glm-5", {"rope_type": "yarn", "rotary_scaling_factor": 40.0}),
    ("glm-5", {"rotary_base": 10_000}),
    ("glm-5", {"dsa_indexer_topk": 3}),
    ("glm-5", {"dsa_indexer_rope_interleaved": False}),
]


@pytest.mark.parametrize(("model", "change"), ROWS, ids=[f"{m}-{next(iter(c))}" for m, c in ROWS])
def test_what_moves_rows_or_counts_is_a_defect(model: str, change: dict[str, Any]) -> None:
    spec = spec_of(raw_config(model))
    args = vars(args_namespace(spec, padded_vocab_size=spec.vocab_size)) | change
    if model.startswith("glm-4.5") and "moe_router_topk_scaling_factor" in change:
        assert spec.moe is not None
    found = contradictions(args, spec)
    name = "num_query_groups" if "group_query_attention" in change else next(iter(change))
    assert [one.severity for one in found if f"says {name} " in one.what] == ["error"]


@pytest.mark.parametrize(("model", "change"), FORWARD, ids=[f"{m}-{next(iter(c))}" for m, c in FORWARD])
def test_what_changes_the_forward_pass_is_a_warning_and_strict_an_error(
    model: str, change: dict[str, Any]
) -> None:
    spec = spec_of(raw_config(model) | ({"routed_scaling_factor": 2.5} if model == "glm-4.5" else {}))
    args = vars(args_namespace(spec, padded_vocab_size=spec.vocab_size)) | change
    found = contradictions(args, spec)
    assert {one.severity for one in found} == {"warning"}
    assert {one.severity for one in contradictions(args, spec, strict=True)} == {"error"}
    assert all("config.json" in one.what for one in found)


def test_norm_topk_prob_is_the_opposite_of_pre_softmax() -> None:
    spec = spec_of(raw_config("qwen3-moe") | {"norm_topk_prob": True})
    args = vars(args_namespace(spec, padded_vocab_size=spec.vocab_size))
    assert contradictions(args, spec) == []
    assert len(contradictions(args | {"moe_router_pre_softmax": True}, spec)) == 1


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "change",
    [
        {"yarn_beta_fast": 16.0},
        {"yarn_beta_slow": 2.0},
        {"mscale": 0.5},
        {"mscale_all_dim": 0.5},
        {"yarn_original_max_position_embeddings": 64},
        {"rotary_scaling_factor": 8.0},
        {"position_embedding_type": "rope"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_numbers_of_yarn_are_compared_where_it_is_in_use(change: dict[str, Any]) -> None:
    spec = spec_of(raw_config("qwen3") | {"rope_scaling": YARN})
    args = vars(args_namespace(spec, padded_vocab_size=spec.vocab_size))
    assert contradictions(args, spec) == []
    assert [one.severity for one in contradictions(args | change, spec)] == ["warning"]


def test_every_claim_has_been_contradicted() -> None:
    tried = {name for _, change in (*ROWS, *FORWARD) for name in change}
    tried |= {"num_query_groups", "moe_router_pre_softmax", "rope_scaling", "moe_router_group_topk"}
    tried |= {"share_embeddings_and_output_weights", "yarn_beta_fast", "yarn_beta_slow", "mscale"}
    tried |= {"mscale_all_dim", "original_max_position_embeddings"}
    assert [claim.names for claim in CLAIMS if not tried & set(claim.names)] == []


@pytest.mark.parametrize("value", [None, "many", True, [4], -1, float("nan"), {}])
def test_a_value_that_is_no_count_says_nothing(value: object) -> None:
    spec = spec_of(raw_config("qwen3"))
    assert contradictions({"num_attention_heads": value, "padded_vocab_size": value}, spec) == []


def test_what_the_run_says_of_its_head_and_its_router() -> None:
    assert says_tied([Fields({"untie_embeddings_and_output_weights": False})]) is True
    assert says_tied([Fields({}), Fields({"share_embeddings_and_output_weights": False})]) is False
    assert says_tied([Fields({"untie_embeddings_and_output_weights": None})]) is None
    router = {"num_experts": 8, "moe_router_enable_expert_bias": False}
    assert says_router_bias([Fields(router)]) is False
    assert says_router_bias([Fields(router | {"num_experts": None})]) is None


# Through the commands ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``sound(model, dialect)``: the unit as a trainer leaves it, without our manifest and HF config."""
    made: dict[str, Path] = {}

    def make(model: str, dialect: str = "mcore") -> Path:
        key = f"{model} {dialect}"
        if key not in made:
            root = tmp_path_factory.mktemp("trained")
            convert(checkpoint(model), root, target=TargetOptions(to="megatron", dialect=dialect))
            shutil.rmtree(root / "release" / "hf")
            (root / "release" / "glmconv.json").unlink()
            made[key] = root
        return made[key]

    return make


def trained(root: Path, place: Path, **changes: Any) -> Path:
    """A copy whose args are changed."""
    shutil.copytree(root, place)
    file = place / "release" / "common.pt"
    state = read_common(place / "release")
    state["args"] = Namespace(**(vars(state["args"]) | changes))
    file.write_bytes(write_common(state))
    return place


def run(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "glmconv", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "400"}
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "glm-4.5-air"])
def test_other_heads_of_equal_shapes_are_refused(
    model: str, checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    """Half the heads, each twice as wide: every shape agrees, and every row of q, k, v would move."""
    config = load_config(checkpoint(model))
    heads, groups, width = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    wrong = {"num_attention_heads": heads // 2, "num_key_value_heads": groups // 2, "head_dim": width * 2}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | wrong))
    options = SourceOptions(origin_hf_dir=other)
    with pytest.raises(DataError) as error:
        convert(sound(model), tmp_path / "out", source=options)
    assert f"says num_attention_heads {heads}, config.json {heads // 2}" in str(error.value)
    assert not (tmp_path / "out").exists()
    report = check(sound(model), CheckOptions(source=options))
    assert not report.ok
    kinds = {finding.kind for finding in report.findings if finding.severity == "error"}
    # A norm over each head shows the other width in its shape; without one the shapes say nothing.
    assert kinds == ({"evidence", "shape"} if config.get("use_qk_norm", True) else {"evidence"})


@pytest.mark.slow
def test_the_commands_warn_of_what_changes_the_forward_pass_and_strict_refuses(
    checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    hf = checkpoint("qwen3")
    place = trained(sound("qwen3"), tmp_path / "run", rotary_base=12345)
    words = ("--origin-hf-dir", hf)
    code, text = run("convert", place, tmp_path / "out", *words, "-q")
    assert code == 0, text
    assert "says rotary_base 12345" in text
    code, text = run("convert", place, tmp_path / "strict", *words, "--strict")
    assert "rotary_base 12345" in text
    assert code == 1
    assert not (tmp_path / "strict").exists()
    assert run("check", place, *words)[0] == 0
    code, text = run("check", place, *words, "--strict")
    assert (code, "rotary_base 12345" in text) == (1, True)
    shown = {one.name: one for one in inspect(place, SourceOptions(origin_hf_dir=hf)).evidence}
    assert (shown["rotary_base"].said, shown["rotary_base"].agrees) == ("12345", False)
    assert shown["num_layers"].agrees


@pytest.mark.parametrize(("tied", "says"), [("qwen3", True), ("qwen3-untied", False)])
def test_a_run_and_a_config_that_disagree_about_the_head(
    tied: str, says: bool, checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = load_config(checkpoint(tied)) | {"tie_word_embeddings": not says}
    (other / "config.json").write_text(json.dumps(config))
    options = SourceOptions(origin_hf_dir=other)
    if says:  # the head that the config promises is not there either: the run is believed, and said
        planned = plan_conversion(sound(tied), options)
        assert planned.source.spec.tied
        assert any(one.kind == "tied" for one in planned.warnings)
        return
    with pytest.raises(DataError, match="untie_embeddings_and_output_weights"):
        plan_conversion(sound(tied), options)


def test_args_that_are_absent_or_unreadable_say_nothing(
    checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    options = SourceOptions(origin_hf_dir=checkpoint("qwen3"), strict=True)
    for number, state in enumerate((b"torn", write_common({}), write_common({"args": "none"}), None)):
        place = shutil.copytree(sound("qwen3"), tmp_path / str(number))
        file = place / "release" / "common.pt"
        file.unlink()
        if state is not None:
            file.write_bytes(state)
        assert plan_conversion(place, options).source.evidence == []


RUN_CONFIG = """\
checkpoint:
  save: /somewhere
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  hidden_size: {hidden}
  layernorm_epsilon: 1.0e-06
  moe_layer_freq: &id001
  - 0
  - 1
  num_attention_heads: {heads}
  num_layers: {layers}
  num_moe_experts: null
  num_query_groups: {groups}
  odd: !!python/object/apply:os.system ['true']
  rotary_base: {base}
  share_embeddings_and_output_weights: true
train:
  num_layers: 99
"""


def test_the_run_config_of_megatron_bridge_is_compared_too(
    checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    hf = checkpoint("qwen3")
    config = load_config(hf)
    place = shutil.copytree(sound("qwen3"), tmp_path / "run")
    (place / "release" / "common.pt").write_bytes(write_common({"checkpoint_version": 3.0}))
    right = {
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "layers": config["num_hidden_layers"],
        "groups": config["num_key_value_heads"],
        "base": 1000000,
    }
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    right["base"] = int(base)
    options = SourceOptions(origin_hf_dir=hf)
    file = place / "release" / "run_config.yaml"
    file.write_text(RUN_CONFIG.format(**right))
    source = plan_conversion(place, options).source
    assert [one.name for one in source.evidence if not one.agrees] == []
    assert {"num_layers", "rotary_base", "share_embeddings_and_output_weights", "layernorm_epsilon"} <= {
        one.name for one in source.evidence
    }
    file.write_text(RUN_CONFIG.format(**right | {"heads": 1}))
    with pytest.raises(DataError, match=r"run_config\.yaml.*says num_attention_heads 1"):
        plan_conversion(place, options)


def test_a_nested_transformer_block_and_hostile_yaml(tmp_path: Path) -> None:
    from glmconv.source.torchdist.run_config import read_run_config

    file = tmp_path / "run_config.yaml"
    file.write_text(
        "model:\n  _builder_: a.B\n  transformer:\n    num_layers: 7\n    x: [1, 2]\n  vocab_size: 9\n"
    )
    assert read_run_config(file) == {"num_layers": 7, "vocab_size": 9, "_builder_": "a.B"}
    for text in (
        "\x00\xff",
        "model: &a [*a]",
        "model:\n" + "  - x\n" * 9,
        "model:\n  a: |\n    b: 3\n    c: 4\n",
    ):
        file.write_text(text)
        assert read_run_config(file) == {}
    file.write_bytes(b"model:\n  num_layers: 3\n" + b"#" * (5 << 20))
    assert read_run_config(file) == {}


# A config made of the args -----------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["mcore", "slime"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "glm-4.5-air", "glm-5", "glm-5.2"])
def test_a_config_is_made_from_the_args_where_there_is_none(
    model: str, dialect: str, checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    hf = checkpoint(model)
    family = load_config(hf)["model_type"]
    options = SourceOptions(model_type=family, config_from_args=True, dialect=dialect)
    report = convert(sound(model, dialect), tmp_path / "out", source=options)
    assert [warning.kind for warning in report.warnings] == ["config-from-args"]
    manifest = read_manifest(tmp_path / "out" / "glmconv.json")
    assert manifest is not None
    assert manifest["config_from_args"] is True
    made, true = load_config(tmp_path / "out"), load_config(hf)
    left, right = spec_of(made), spec_of(true)
    for name in ModelSpec.__slots__:
        if name != "raw":
            assert getattr(left, name) == getattr(right, name), name
    assert made["architectures"] == true["architectures"]
    ours, theirs = load_tensors(tmp_path / "out"), load_tensors(hf)
    assert {name: t.tolist() for name, t in ours.items() if name in theirs} == {
        name: t.to(ours[name].dtype).tolist() for name, t in theirs.items() if name in ours
    }
    assert set(theirs) - set(ours) <= {n for n in theirs if "embed_tokens" in n or "head" in n}


def test_a_config_from_args_needs_a_family_and_no_other_config(
    checkpoint: Callable[..., Path], sound: Callable[..., Path], tmp_path: Path
) -> None:
    asked = SourceOptions(config_from_args=True)
    with pytest.raises(UsageError, match="--model-type"):
        plan_conversion(sound("qwen3"), asked)
    named = trained(sound("qwen3"), tmp_path / "named", model_name="qwen3config")
    assert plan_conversion(named, asked).source.spec.model_type == "qwen3"
    both = SourceOptions(config_from_args=True, model_type="qwen3", origin_hf_dir=checkpoint("qwen3"))
    with pytest.raises(UsageError, match="there is one"):
        plan_conversion(sound("qwen3"), both)
    bare = trained(sound("glm-5"), tmp_path / "bare", dsa_indexer_topk=None, vocab_size=None)
    with pytest.raises(DataError, match=r"vocab_size.*dsa_indexer_topk"):
        plan_conversion(bare, SourceOptions(config_from_args=True, model_type="glm_moe_dsa"))
    code, text = run("convert", sound("qwen3"), tmp_path / "out", "-q")
    assert code != 0
    assert "--config-from-args" in text


def test_the_wrong_family_is_not_made_to_fit(sound: Callable[..., Path], tmp_path: Path) -> None:
    place = trained(sound("qwen3"), tmp_path / "run", swiglu=False)
    with pytest.raises(DataError, match="says swiglu false"):
        plan_conversion(place, SourceOptions(config_from_args=True, model_type="qwen3"))
