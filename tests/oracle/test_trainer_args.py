"""The args of our checkpoints in the hands of megatron-core, and our defaults beside transformers' own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glmconv.basics.errors import DataError
from glmconv.commands.convert import convert
from glmconv.plan.parser_defaults import parser_defaults
from glmconv.plan.planner import TargetOptions
from glmconv.plan.training_args import args_namespace
from glmconv.tables.registry import FAMILIES, get_bridge
from glmconv.tables.rules import DIALECTS
from glmconv.tables.spec import ModelSpec
from tests.support import mcore_run, trainer_jobs
from tests.support.checkpoints import MODELS as MADE
from tests.support.checkpoints import load_config, load_tensors, raw_config

MODELS = ("qwen3", "qwen3-moe", "glm-4.5-air", "glm-5.2")
lanes = pytest.mark.parametrize("lane", mcore_run.LANES)


@lanes
def test_megatron_loads_every_dialect_with_its_args(
    lane: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    units, models = {}, {}
    for model in MODELS:
        for dialect in DIALECTS:
            place = tmp_path / f"{model}-{dialect}"
            convert(checkpoint(model), place, target=TargetOptions(to="megatron", dialect=dialect))
            units[place.name], models[place.name] = str(place / "release"), model
    found = mcore_run.run(trainer_jobs.load_all, lane=lane, arguments={"units": units})[0]
    assert set(found) == set(units)
    for name, one in found.items():
        hf = checkpoint(models[name])
        config, tensors = load_config(hf), load_tensors(hf)
        assert set(parser_defaults()) <= set(one["fields"])
        assert one["dtype"] == "torch.bfloat16"
        assert one["config"]["num_layers"] == config["num_hidden_layers"]
        assert one["config"]["hidden_size"] == config["hidden_size"]
        assert one["config"]["layernorm_epsilon"] == config["rms_norm_eps"]
        again = (".shared_head.head.", f".{config['num_hidden_layers']}.embed_tokens.")
        kept = [t for n, t in tensors.items() if not any(word in n for word in again)]
        assert one["elements"] == sum(tensor.numel() for tensor in kept)


SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "partial": ("glm-4.5", {}),
    "linear": ("qwen3", {"rope_type": "linear", "factor": 4}),
    "stepwise": (
        "qwen3",
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    "yarn of all numbers": (
        "qwen3",
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
    ),
    "yarn by attention factor": (
        "qwen3",
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.4},
    ),
    "latent": ("glm-5", {}),
    "latent yarn": (
        "glm-5",
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}
POSITIONS = 300


def scaled_config(model: str, block: dict[str, Any]) -> dict[str, Any]:
    config = raw_config(model)
    config["rope_theta"] = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    inner = dict(config.pop("rope_parameters", None) or {})
    inner |= {"rope_theta": config["rope_theta"], **(block or {"rope_type": "default"})}
    if "partial_rotary_factor" in config:
        inner["partial_rotary_factor"] = config["partial_rotary_factor"]
    return config | {"rope_parameters": inner, "max_position_embeddings": 4 * 64}


def hf_angles(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Angles and factor of cos and sin as transformers computes them for this config."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = AutoConfig.for_model(**config)
    kind = made.rope_parameters["rope_type"]
    if kind == "default":
        width = int(made.head_dim * made.rope_parameters.get("partial_rotary_factor", 1.0))
        frequencies = 1.0 / made.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
        factor = 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"))
    return torch.outer(torch.arange(POSITIONS).float(), frequencies).double(), factor


@lanes
def test_args_give_the_rotary_embedding_of_the_config(lane: str) -> None:
    """Megatron's own embedding, made of our args, turns by transformers' angles."""
    configs = {name: scaled_config(model, block) for name, (model, block) in SCALINGS.items()}
    cases = {}
    for name, config in configs.items():
        spec = get_bridge(config["model_type"]).spec(config, {})
        values = vars(args_namespace(spec, padded_vocab_size=spec.vocab_size))
        cases[name] = {key: values[key] for key in trainer_jobs.ROTARY}
    arguments = {"cases": cases, "positions": POSITIONS}
    found = mcore_run.run(trainer_jobs.rotary_angles, lane=lane, arguments=arguments)[0]
    for name, config in configs.items():
        angles, factor = found[name]
        wanted, wanted_factor = hf_angles(config)
        ours = torch.tensor(angles, dtype=torch.float64)
        assert ours.shape == wanted.shape, name
        assert (ours - wanted).abs().max() < 1e-3, name
        assert factor == pytest.approx(wanted_factor, rel=1e-6), name


# Absent fields ------------------------------------------------------------------------------------

CLASSES = {
    "glm_moe_dsa": "GlmMoeDsaConfig",
    "glm4_moe": "Glm4MoeConfig",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
}
COUNTED = ("num_mtp",)
"""Not compared: transformers has no MTP layers, and we count those in the files."""


def example(family: str) -> dict[str, Any]:
    return next(raw_config(model) for model in MADE if raw_config(model)["model_type"] == family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_field_has_the_value_that_transformers_gives_it(family: str) -> None:
    """Without any one field a config is refused, or understood as transformers' class fills it in."""
    assert family in CLASSES
    made = getattr(importlib.import_module("transformers"), CLASSES[family])
    agreed = []
    for field in sorted(set(example(family)) - {"model_type", "dtype", "torch_dtype"}):
        config = {name: value for name, value in example(family).items() if name != field}
        try:
            ours = get_bridge(family).spec(config, {})
        except DataError:
            continue
        filled = {**config, **made(**config).to_dict()}
        theirs = get_bridge(family).spec(filled, {})
        for name in ModelSpec.__slots__:
            if name not in ("raw", "dtype", "remarks", *COUNTED):
                assert _plain(getattr(ours, name), name) == _plain(getattr(theirs, name), name), (field, name)
        agreed.append(field)
    assert "tie_word_embeddings" in agreed
    assert len(agreed) >= 3


def _like(value: Any, name: str) -> Any:
    """transformers writes what it fills in: a rope block of the default kind is no scaling."""
    return (
        replace(value, scaling={})
        if name == "rope" and value.scaling.get("rope_type") == "default"
        else value
    )


def _plain(value: Any, name: str) -> Any:
    """Without what has no effect: the offset of a schedule in which every layer owns its indexer."""
    return replace(value, offset=0) if name == "dsa" and value is not None and value.freq == 1 else value


@pytest.mark.parametrize(("family", "scaling"), [("glm_moe_dsa", 2.5), ("glm4_moe", 1.0)])
def test_the_factor_of_routed_experts_where_config_json_has_none(family: str, scaling: float) -> None:
    config = {name: value for name, value in example(family).items() if name != "routed_scaling_factor"}
    spec = get_bridge(family).spec(config, {})
    assert args_namespace(spec, padded_vocab_size=spec.vocab_size).moe_router_topk_scaling_factor == scaling
