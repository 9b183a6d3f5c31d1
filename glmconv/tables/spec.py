"""What a bridge makes of ``config.json``: every number that the maths of a conversion needs.

A ``ModelSpec`` is family-neutral. Past the bridge no code reads the raw config for structure
again; ``raw`` stays with it for the runtime that ``verify`` builds and for the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glmconv.basics.errors import Defect


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention; all sizes are rows of weight matrices."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts. ``ffn_size`` and ``shared_ffn_size`` are rows of gate (and of up)."""

    num_experts: int
    ffn_size: int
    top_k: int
    shared_ffn_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    score_function: str = "softmax"
    num_groups: int = 1
    top_k_groups: int = 1
    scaling: float = 1.0
    normalise: bool = True


@dataclass(frozen=True, slots=True)
class Dsa:
    """Sparse-attention indexer. ``full[i]``: decoder layer i owns (computes) an indexer.

    A layer that does not own one reuses the token selection of the nearest earlier owner
    (GLM-5.2). ``freq`` and ``offset`` are the runtime's way to say the same schedule.
    """

    num_heads: int
    head_dim: int
    top_k: int
    full: tuple[bool, ...]
    freq: int
    offset: int
    rope_interleave: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the main attention."""

    theta: float
    partial_factor: float = 1.0
    interleaved: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, validated. Layer numbers are 0-based; MTP layers are counted apart.

    ``remarks``: what the config says beyond these numbers, each key by its name
    (``glmconv.tables.config_fields.Fields.remarks``).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    tied: bool
    rope: Rope
    max_positions: int
    qkv_bias: bool = False
    qk_norm: bool = False
    mla: Mla | None = None
    moe: Moe | None = None
    moe_layers: tuple[bool, ...] = ()
    dsa: Dsa | None = None
    num_mtp: int = 0
    dtype: str = "bfloat16"
    raw: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[Defect, ...] = ()

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` has experts; an MTP layer follows the last one."""
        return bool(self.moe_layers) and self.moe_layers[min(layer, self.num_layers - 1)]

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer owns an indexer; MTP layers (``layer >= num_layers``) always do."""
        if self.dsa is None:
            return False
        return layer >= self.num_layers or self.dsa.full[layer]
