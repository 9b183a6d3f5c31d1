"""The args that we write describe the model that was converted, in every field that a trainer may read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.dtypes import DType
from glmconv.commands.check import check
from glmconv.commands.convert import convert
from glmconv.formats.torchdist.common import read_common
from glmconv.plan.parser_defaults import parser_defaults
from glmconv.plan.planner import TargetOptions
from glmconv.plan.training_args import args_namespace, unsaid
from glmconv.tables.registry import get_bridge
from glmconv.tables.rules import DIALECTS
from glmconv.tables.spec import ModelSpec, Rope
from tests.support.checkpoints import load_config, load_tensors, raw_config

MODELS = ("qwen3", "qwen3-moe", "glm-4.5-air", "glm-5.2")
READ_BY_EXPORTERS = ("q_lora_rank", "kv_channels", "num_query_groups", "vocab_size", "num_experts", "spec")
"""Some of what slime's and miles' exporters read as if it were always there."""


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return get_bridge(config["model_type"]).spec(config, {})


def args_of(root: Path) -> Any:
    return read_common(root / "release")["args"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", MODELS)
def test_args_carry_every_field_of_the_parsers(
    model: str, dialect: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    convert(checkpoint(model), tmp_path, target=TargetOptions(to="megatron", dialect=dialect))
    args = args_of(tmp_path)
    assert sorted(set(parser_defaults()) - set(vars(args))) == []
    for name in READ_BY_EXPORTERS:
        getattr(args, name)
    assert (args.q_lora_rank is None) == (load_config(checkpoint(model))["model_type"] != "glm_moe_dsa")


def test_the_list_of_fields_is_whole() -> None:
    """The number that ``scripts/parser_fields.py`` found in seven parsers, less one object."""
    fields = parser_defaults()
    assert len(fields) == 896
    assert (fields["num_layers"], fields["rotary_base"], fields["add_bias_linear"]) == (None, 10000, True)
    assert fields["cp_comm_type"] == ["p2p"]
    assert parser_defaults()["cp_comm_type"] is not fields["cp_comm_type"]


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("float32", (False, False)), ("float16", (False, True)), ("bfloat16", (True, False))],
)
@pytest.mark.parametrize("model", ["qwen3", "glm-5.2"])
def test_a_cast_is_in_the_args_and_in_the_config(
    model: str, dtype: str, flags: tuple[bool, bool], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    convert(checkpoint(model), tmp_path, target=TargetOptions(to="megatron", dtype=dtype))
    args = args_of(tmp_path)
    assert args.params_dtype.torch_name == dtype
    assert (args.bf16, args.fp16) == flags
    config = load_config(tmp_path / "release" / "hf")
    assert config.get("dtype", config.get("torch_dtype")) == dtype
    assert check(tmp_path).ok


def wrong_dtype(hf: Path, place: Path, **fields: Any) -> Path:
    """A link farm of ``hf`` whose config says other dtypes."""
    place.mkdir()
    for file in hf.iterdir():
        if file.name != "config.json":
            os.link(file, place / file.name)
    config = {name: value for name, value in load_config(hf).items() if name not in ("dtype", "torch_dtype")}
    (place / "config.json").write_text(json.dumps(config | fields))
    return place


@pytest.mark.parametrize("fields", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
@pytest.mark.parametrize("model", ["qwen3", "glm-4.5-air"])
def test_weights_in_fp32_under_another_dtype_in_the_config(
    model: str, fields: dict[str, str], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Both ways: what is written beside F32 weights says float32, and so do the args."""
    source = wrong_dtype(checkpoint(model, dtype="float32"), tmp_path / "hf", **fields)
    report = check(source)
    assert [finding.kind for finding in report.warnings] == ["dtype"]
    made = convert(source, tmp_path / "run", target=TargetOptions(to="megatron"))
    assert "dtype" in [warning.kind for warning in made.warnings]
    args, field = args_of(tmp_path / "run"), next(iter(fields))
    assert (args.params_dtype, args.bf16, args.fp16) == (DType.F32, False, False)
    assert load_config(tmp_path / "run" / "release" / "hf")[field] == "float32"
    convert(tmp_path / "run", tmp_path / "back")
    assert load_config(tmp_path / "back")[field] == "float32"
    assert {str(t.dtype) for t in load_tensors(tmp_path / "back").values()} == {"torch.float32"}
    assert check(tmp_path / "back").warnings == []


def test_a_dtype_in_text_config_follows_the_weights(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    inner = {"text_config": {"dtype": "bfloat16", "other": 1}}
    source = wrong_dtype(checkpoint("qwen3", dtype="float32"), tmp_path / "hf", **inner)
    convert(source, tmp_path / "out", target=TargetOptions(to="hf"))
    config = load_config(tmp_path / "out")
    assert config["text_config"] == {"dtype": "float32", "other": 1}


def test_a_config_whose_dtype_is_right_is_copied_byte_for_byte(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    convert(checkpoint("qwen3"), tmp_path / "out", target=TargetOptions(to="hf"))
    assert (tmp_path / "out/config.json").read_bytes() == (checkpoint("qwen3") / "config.json").read_bytes()


DENSE = spec_of(raw_config("qwen3"))
LATENT = spec_of(raw_config("glm-5"))
PARTIAL = spec_of(raw_config("glm-4.5"))


def scaled(spec: ModelSpec, **block: Any) -> ModelSpec:
    return replace(spec, rope=replace(spec.rope, scaling=block))


def written(spec: ModelSpec) -> Any:
    return args_namespace(spec, padded_vocab_size=spec.vocab_size)


def test_yarn_without_latent_attention() -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False}
    args = written(scaled(DENSE, **block))
    assert (args.position_embedding_type, args.rotary_scaling_factor) == ("yarn", 4.0)
    assert args.yarn_original_max_position_embeddings == 32768
    assert (args.yarn_beta_fast, args.yarn_beta_slow) == (32, 1)
    assert (args.mscale, args.mscale_all_dim) == (1.0, 0.0)
    assert args.yarn_correction_range_round_to_int is False


def test_the_other_kinds_of_scaling() -> None:
    linear = written(scaled(DENSE, type="linear", factor=2))
    assert (linear.position_embedding_type, linear.rotary_seq_len_interpolation_factor) == ("rope", 2)
    stepwise = written(scaled(DENSE, rope_type="llama3", factor=32.0))
    assert (stepwise.use_rope_scaling, stepwise.rope_scaling_factor) == (True, 32.0)
    plain = written(DENSE)
    assert (plain.use_rope_scaling, plain.position_embedding_type) == (False, "rope")
    assert plain.rotary_seq_len_interpolation_factor is None
    latent = written(LATENT)
    assert (latent.rope_type, latent.rotary_scaling_factor) == ("rope", 1.0)


YARN = {"rope_type": "yarn", "factor": 4.0}
STEPS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OLD = ("mcore-0.18", "slime", "miles")


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (DENSE, ()),
        (scaled(DENSE, **YARN), OLD),
        (scaled(PARTIAL, **YARN), DIALECTS),
        (scaled(DENSE, rope_type="linear", factor=2.0), OLD),
        (scaled(DENSE, rope_type="llama3", factor=8.0, **STEPS), ()),
        (scaled(DENSE, rope_type="llama3", factor=8.0, **STEPS | {"low_freq_factor": 2.0}), DIALECTS),
        (scaled(DENSE, rope_type="dynamic", factor=2.0), DIALECTS),
        (scaled(DENSE, rope_type="longrope", factor=2.0), DIALECTS),
        (LATENT, ()),
        (scaled(LATENT, **YARN, mscale=1.0, mscale_all_dim=1.0), ()),
        (scaled(LATENT, **YARN), ("slime", "miles")),
        (scaled(LATENT, rope_type="linear", factor=2.0), DIALECTS),
    ],
)
def test_what_args_cannot_say_is_said_for_the_dialects_that_cannot(
    spec: ModelSpec, where: tuple[str, ...]
) -> None:
    assert {dialect for dialect in DIALECTS if unsaid(spec, dialect)} == set(where)


def test_what_a_router_cannot_be_told_is_said() -> None:
    assert LATENT.moe is not None
    moe = replace(LATENT.moe, top_k=2)
    assert unsaid(replace(LATENT, moe=moe), "mcore") == []
    assert len(unsaid(replace(LATENT, moe=replace(moe, normalise=False)), "mcore")) == 1
    grouped = replace(moe, num_groups=4, top_k_groups=2, top_k=2)
    assert len(unsaid(replace(LATENT, moe=grouped), "mcore")) == 1
    assert unsaid(replace(LATENT, moe=replace(grouped, top_k=4)), "mcore") == []
    assert LATENT.dsa is not None
    half = replace(LATENT, dsa=replace(LATENT.dsa, rope_interleave=False))
    assert [bool(unsaid(half, dialect)) for dialect in ("mcore", "mcore-0.18")] == [False, True]


def test_convert_warns_of_what_args_cannot_say(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    hf = checkpoint("qwen3")
    source = wrong_dtype(hf, tmp_path / "hf", torch_dtype="bfloat16")
    config = load_config(source)
    block = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    config |= {"rope_parameters": block} if "rope_parameters" in config else {"rope_scaling": block}
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "run", target=TargetOptions(to="megatron"))
    assert [warning.what for warning in report.warnings if warning.kind == "runtime"] == [
        "a trainer's args cannot say: rope scaling 'dynamic'"
    ]


def test_rope_of_a_float_base() -> None:
    assert written(replace(DENSE, rope=Rope(1e6))).rotary_base == 1_000_000
    assert written(replace(DENSE, rope=Rope(12345.5))).rotary_base == 12345.5
