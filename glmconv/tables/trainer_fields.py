"""What a trainer wrote down about its model, read as that trainer means it.

Sources: Megatron-LM d98e8a64, megatron/training/arguments.py (``validate_args``) and argument_utils.py
(``core_transformer_config_from_args``); Megatron-Bridge 067f987d, models/gpt_provider.py, whose
``run_config.yaml`` has the field names of ``TransformerConfig``; slime 624b824a,
backends/megatron_utils/arguments.py. A field that its trainer does not use for this kind of model
(a default of the parser) says nothing, and neither does one that is absent or of another type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Scaling = tuple[str, float]
"""Kind of rope scaling and factor; ``("none", 1.0)`` where there is none."""

PLAIN: Scaling = ("none", 1.0)
STEPWISE = "llama3"
"""The kind that Megatron's ``use_rope_scaling`` switches on."""

STEPS = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Its numbers, for which megatron-core has no argument."""

ROTATING = ("rope", "yarn")


class Fields:
    """The fields of ``args``, or of ``model`` in a ``run_config.yaml``, by either's names."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def name(self, *names: str) -> str:
        """The first of several names that is there, for messages."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def _first(self, names: tuple[str, ...]) -> Any:
        return self.values.get(self.name(*names))

    def natural(self, *names: str) -> int | None:
        value = self._first(names)
        return value if type(value) is int and value >= 0 else None

    def number(self, *names: str) -> float | None:
        value = self._first(names)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return value if math.isfinite(value) and value >= 0 else None

    def flag(self, *names: str) -> bool | None:
        value = self._first(names)
        return value if isinstance(value, bool) else None

    def text(self, *names: str) -> str | None:
        value = self._first(names)
        return value if isinstance(value, str) else None

    @property
    def latent(self) -> bool:
        return self.flag("multi_latent_attention") is True

    @property
    def sparse(self) -> bool:
        """Whether the indexer's fields are in use."""
        return self.text("experimental_attention_variant") == "dsa"

    @property
    def experts(self) -> int | None:
        """None for a dense model, whose other MoE fields are defaults."""
        return self.natural("num_experts", "num_moe_experts")

    @property
    def rotates(self) -> bool:
        """Whether the fields of the rotary embedding are in use."""
        kind = self.text("position_embedding_type")
        given = kind is None or kind in ROTATING or self.flag("use_rotary_position_embeddings") is True
        return self.latent or given

    def groups(self) -> int | None:
        """Groups of query heads; without ``group_query_attention`` every head is its own."""
        if self.latent:
            return None
        if self.flag("group_query_attention") is False:
            return self.natural("num_attention_heads")
        groups = self.natural("num_query_groups")
        # 1 is the parser's default, and nothing says that it is in use.
        return groups if groups != 1 or self.flag("group_query_attention") else None

    def tied(self) -> bool | None:
        untied = self.flag("untie_embeddings_and_output_weights")
        return self.flag("share_embeddings_and_output_weights") if untied is None else not untied

    def mtp_layers(self) -> int | None:
        """None also where no MTP was trained, and where one layer serves several depths."""
        return None if self.flag("mtp_use_repeated_layer") else self.natural("mtp_num_layers") or None

    def moe_layers(self) -> tuple[bool, ...] | None:
        layers, pattern = self.natural("num_layers"), self.values.get("moe_layer_freq")
        if self.experts is None:
            return None
        if isinstance(pattern, (list, tuple)) and pattern and all(one in (0, 1) for one in pattern):
            return tuple(bool(one) for one in pattern)
        if type(pattern) is int and pattern > 0 and layers:
            return tuple(layer % pattern == 0 for layer in range(layers))
        return None

    def router_scaling(self) -> float | None:
        """1.0 where the trainer has the field and does not set it."""
        if self.experts is None or "moe_router_topk_scaling_factor" not in self.values:
            return None
        unset = self.values["moe_router_topk_scaling_factor"] is None
        return 1.0 if unset else self.number("moe_router_topk_scaling_factor")

    def router_groups(self, name: str) -> int | None:
        """1 where the trainer has the field and does not set it; ``name``: groups, or those chosen."""
        if self.experts is None or name not in self.values:
            return None
        grouped = (self.natural("moe_router_num_groups") or 1) > 1
        return (self.natural(name) or 1) if grouped else 1

    def indexers(self) -> tuple[bool, ...] | None:
        """Which layers compute an index; a frequency of 1 is a default that says nothing."""
        layers, freq = self.natural("num_layers"), self.natural("dsa_indexer_topk_freq") or 1
        if not self.sparse or not layers or freq < 2:
            return None
        offset = self.natural("dsa_indexer_skip_topk_offset") or 0
        return tuple(max(layer + 1 - offset, 0) % freq == 0 for layer in range(layers))

    def scaling(self) -> Scaling | None:
        """Rope scaling as it is run: yarn by a factor of 1 is none."""
        if not self.rotates:
            return None
        if self.latent:
            yarn = self.text("rope_type") != "rope"
            return _effective("yarn", self.number("rotary_scaling_factor")) if yarn else PLAIN
        if self.text("position_embedding_type") == "yarn":
            return _effective("yarn", self.number("yarn_rotary_scaling_factor", "rotary_scaling_factor"))
        stepwise = self.flag("use_rope_scaling", "rope_scaling")
        if stepwise:
            return _effective(STEPWISE, self.number("rope_scaling_factor") or 8.0)
        stretched = self.number("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
        return _effective("linear", stretched) if stretched else None if stepwise is None else PLAIN

    def yarn(self, name: str) -> float | None:
        """A number of yarn scaling, where that is in use."""
        scaling = self.scaling()
        if scaling is None or scaling[0] != "yarn":
            return None
        return self.number(name) if self.latent else self.number(f"yarn_{name}", name)


def _effective(kind: str, factor: float | None) -> Scaling | None:
    return None if factor is None else (kind, float(factor)) if factor != 1 else PLAIN
