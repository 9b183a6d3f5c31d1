"""Position embeddings as Megatron's arguments say them, and what those cannot say.

Sources: Megatron-LM d98e8a64, megatron/training: arguments.py, argument_utils.py
(``_apply_yarn_config_from_args``, ``gpt_config_from_args``); megatron/core: models/common/embeddings,
transformer/multi_latent_attention.py. transformers 5.24, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import STEPS, STEPWISE

COMPLETE = "mcore"
"""The dialect of trainers (Megatron from 0.19 on) with arguments for YaRN and linear scaling."""


def scaling_kind(scaling: Mapping[str, Any]) -> str:
    """``yarn``, ``linear``, …; ``default`` where there is no scaling."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def rope_args(spec: ModelSpec) -> dict[str, Any]:
    """The fields of ``args`` that fix the rotary embedding of the main attention."""
    scaling = spec.rope.scaling
    kind = scaling_kind(scaling)
    values: dict[str, Any] = {
        # MLM load_args_from_checkpoint, MB _gpt_provider. --rotary-base is an int.
        "position_embedding_type": "rope",
        "rotary_base": int(spec.rope.theta) if spec.rope.theta.is_integer() else spec.rope.theta,
        "rotary_percent": spec.rope.partial_factor if spec.mla is None else 1.0,
        "use_rope_scaling": False,
    }
    if spec.mla is not None:
        values["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        values |= _yarn(spec)
    elif spec.mla is None and kind == STEPWISE and _number(scaling, "factor"):
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
    elif spec.mla is None and kind == "linear" and _number(scaling, "factor"):
        values["rotary_seq_len_interpolation_factor"] = scaling["factor"]
    return values


def _number(scaling: Mapping[str, Any], key: str) -> float | None:
    """A number other than 0; transformers takes 0 for absent."""
    value = scaling.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value else None


def _yarn(spec: ModelSpec) -> dict[str, Any]:
    """What the scaling block leaves out has transformers' default."""
    scaling = spec.rope.scaling
    original = _number(scaling, "original_max_position_embeddings") or spec.max_positions
    mscale, all_dim = yarn_mscales(scaling, spec.max_positions)
    fast, slow = _number(scaling, "beta_fast") or 32, _number(scaling, "beta_slow") or 1
    values = {
        "rotary_scaling_factor": yarn_factor(scaling, spec.max_positions),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    if spec.mla is not None:
        return values | {
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
        }
    return values | {
        "position_embedding_type": "yarn",
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": fast,
        "yarn_beta_slow": slow,
        "yarn_correction_range_round_to_int": scaling.get("truncate") is not False,
    }


def yarn_factor(scaling: Mapping[str, Any], max_positions: int) -> float:
    """How far positions are stretched: transformers takes the ratio of lengths where it is absent."""
    original = _number(scaling, "original_max_position_embeddings") or max_positions
    return _number(scaling, "factor") or max_positions / original


def yarn_mscales(scaling: Mapping[str, Any], max_positions: int) -> tuple[float, float]:
    """``mscale`` and ``mscale_all_dim`` with which Megatron multiplies cos and sin as transformers does.

    Megatron takes ``scale(mscale) / scale(mscale_all_dim)`` with ``scale(m) = 0.1 m ln factor + 1``;
    transformers the same where both are given, ``attention_factor`` where that is, else ``scale(1)``.
    """
    factor, given = yarn_factor(scaling, max_positions), _number(scaling, "attention_factor")
    mscale, all_dim = _number(scaling, "mscale"), _number(scaling, "mscale_all_dim") or 0.0
    if given is None and (not all_dim or factor <= 1):
        return 1.0, all_dim
    if given is None and mscale:
        return mscale, all_dim
    step = 0.1 * math.log(factor) if factor > 1 else 0.0
    wanted = given if given is not None else step + 1
    return ((wanted * (step * all_dim + 1) - 1) / step if step else 1.0), all_dim


def unsaid_rope(spec: ModelSpec, dialect: str) -> list[str]:
    """What of the rotary embedding the arguments of a dialect's trainers cannot say."""
    scaling, mla = spec.rope.scaling, spec.mla is not None
    kind = scaling_kind(scaling)
    if kind == "yarn":
        return _unsaid_latent_yarn(spec, dialect) if mla else _unsaid_yarn(spec, dialect)
    if kind == STEPWISE and not mla:
        other = [key for key, value in STEPS.items() if scaling.get(key, value) != value]
        return [
            f"rope scaling {kind!r} with {key} {scaling[key]}: Megatron takes {STEPS[key]}" for key in other
        ]
    if kind == "linear" and not mla:
        return (
            []
            if dialect == COMPLETE
            else [f"rope scaling {kind!r}: Megatron before 0.18 ignores its argument"]
        )
    return [] if kind == "default" else [f"rope scaling {kind!r}"]


def _unsaid_latent_yarn(spec: ModelSpec, dialect: str) -> list[str]:
    """slime_plugins and miles_plugins, models/glm5/glm5.py, have an attention of their own."""
    mscale, all_dim = yarn_mscales(spec.rope.scaling, spec.max_positions)
    if mscale == all_dim or dialect not in ("slime", "miles"):
        return []
    return ["rope scaling 'yarn': its attention scales scores by mscale, transformers by mscale_all_dim"]


def _unsaid_yarn(spec: ModelSpec, dialect: str) -> list[str]:
    """megatron-core's ``YarnRotaryEmbedding`` takes ``rotary_percent`` and does not use it."""
    found = []
    if dialect != COMPLETE:
        found.append(
            "rope scaling 'yarn' without latent attention: Megatron before 0.19 has no arguments for it"
        )
    if spec.rope.partial_factor != 1:
        found.append("rope scaling 'yarn' with a partial_rotary_factor: Megatron turns the whole head then")
    return found
