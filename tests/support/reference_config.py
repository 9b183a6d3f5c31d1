"""What a raw ``config.json`` says about a model, for the hand-written reference alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Config = dict[str, Any]

FAMILIES = ("glm_moe_dsa", "glm4_moe", "qwen3", "qwen3_moe")
DIALECTS = ("mcore", "mcore-0.18", "slime", "miles")


def check(config: Config, dialect: str) -> None:
    """Raises ``ValueError`` for a family or dialect that the reference does not know."""
    if config["model_type"] not in FAMILIES:
        raise ValueError(f"no reference for model_type {config['model_type']!r}")
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}")


def is_sparse(config: Config, layer: int) -> bool:
    """Whether decoder layer ``layer`` has experts."""
    if config["model_type"] == "qwen3":
        return False
    if config["model_type"] == "qwen3_moe":
        return True
    if config.get("mlp_layer_types"):
        return bool(config["mlp_layer_types"][layer] == "sparse")
    return bool(layer >= config["first_k_dense_replace"])


def mtp_layers(config: Config) -> int:
    """Number of MTP layers; families without the key have none."""
    return int(config.get("num_nextn_predict_layers") or 0)


def num_experts(config: Config) -> int:
    """Routed experts a layer."""
    return int(config["num_experts"] if config["model_type"] == "qwen3_moe" else config["n_routed_experts"])


def has_qk_norm(config: Config) -> bool:
    """Whether queries and keys are normed per head."""
    return config["model_type"] in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm"))


def indexer_is_swapped(config: Config, dialect: str) -> bool:
    """Whether the dialect keeps the rope channels of an index head last."""
    if dialect == "miles":
        return bool(config.get("indexer_rope_interleave"))
    return dialect in ("mcore-0.18", "slime")


def same(left: Tensor, right: Tensor) -> bool:
    """Equal values; meta tensors, which have none, count as equal."""
    return left.is_meta or torch.equal(left, right)
