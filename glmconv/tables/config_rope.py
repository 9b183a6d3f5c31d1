"""The rotary embedding of a raw ``config.json``, key by key.

Facts: transformers 5.24 (``modeling_rope_utils``: ``convert_rope_params_to_dict``,
``_compute_yarn_parameters``), megatron-core 0.16.1 and 0.19.2 (``yarn_rotary_pos_embedding``,
``multi_latent_attention``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from glmconv.basics.abbreviated import brief
from glmconv.tables.config_fields import UNREAD, Fields, finite
from glmconv.tables.spec import Rope

BLOCKS = ("rope_scaling", "rope_parameters")
"""Older and newer name of the block; transformers takes the first alone where both are there."""
COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""YaRN's numbers that Megatron-Core's latent attention takes."""

Block = Mapping[str, Any]


class RopeFields(Fields):
    """Adds ``rope_theta``, ``rope_parameters``, ``rope_scaling`` and ``partial_rotary_factor``."""

    def rope(
        self,
        max_positions: int,
        *,
        partial: float | None = None,
        interleaved: bool = False,
        yarn: bool = False,
    ) -> Rope:
        """The rotary embedding; a scaling is given as it is written, with transformers' defaults filled in.

        ``partial``: the share of a head that rotates where the config does not say; None for a family
        that rotates whole heads whatever it says. ``yarn``: the family's attention at Megatron-Core
        takes YaRN's numbers. Any other scaling changes the forward pass and is not carried.
        """
        name, block = self._block()
        for key, value in block.items():
            if isinstance(value, Mapping):
                what = "it is of one kind of layers, the family has one rotary embedding for all"
                self.changes_forward(f"{name}.{key}", value, what)
        scaling = self._scaling(name, block, max_positions, yarn)
        return Rope(self._theta(name, block), self._share(name, block, partial), interleaved, scaling)

    def _block(self) -> tuple[str, Block]:
        """Name and content of the block that counts; an empty one where the config has none."""
        given: dict[str, Block] = {}
        for name in BLOCKS:
            value = self.get(name)
            if value is not None and not isinstance(value, Mapping):
                self.problem(f"must be an object, is {brief(value)}", name)
            elif value:
                given[name] = value
        if len(given) > 1 and given[BLOCKS[0]] != given[BLOCKS[1]]:
            self.problem("contradict each other: transformers takes rope_scaling alone", " and ".join(BLOCKS))
        return next(iter(given.items()), ("rope_parameters", {}))

    def _theta(self, name: str, block: Block) -> float:
        """Base of the rotary embedding; never defaulted, since a wrong one loses quality silently."""
        inner, outer = block.get("rope_theta"), self.get("rope_theta")
        if inner is not None and outer is not None and inner != outer:
            both = f"rope_theta {brief(outer)} and {name}.rope_theta {brief(inner)}"
            self.problem(f"{both} contradict", "rope_theta")
        theta = inner if inner is not None else outer
        number = finite(theta)
        if number is None or number <= 0:
            what = "missing" if theta is None else f"must be a positive number, is {brief(theta)}"
            self.problem(what, "rope_theta")
            return 1.0
        return number

    def _share(self, name: str, block: Block, default: float | None) -> float:
        """Share of the head that rotates (``partial_rotary_factor``, in the block or beside it)."""
        key = "partial_rotary_factor"
        outer, inner = self.get(key), block.get(key)
        if inner is not None and outer is not None and inner != outer:
            self.problem(f"{brief(outer)} and {name}.{key} {brief(inner)} contradict", key)
        field, value = (key, outer) if inner is None else (f"{name}.{key}", inner)
        if value is None:
            return 1.0 if default is None else default
        share = finite(value)
        if share is None or share <= 0:
            self.problem(f"must be a positive number, is {brief(value)}", field)
            return 1.0
        if default is None and share != 1.0:
            self.changes_forward(field, value, "the family rotates whole heads, transformers ignores the key")
            return 1.0
        return share

    def _scaling(self, name: str, block: Block, max_positions: int, yarn: bool) -> dict[str, Any]:
        kind, older = block.get("rope_type"), block.get("type")
        if kind is not None and older is not None and kind != older:
            self._remark(UNREAD, f"{name}.type", older, f"is not read: rope_type says {brief(kind)}")
        kind = kind or older or "default"
        original = self.get("original_max_position_embeddings")
        flat = {key: value for key, value in block.items() if not isinstance(value, Mapping)}
        self._check_numbers(name, flat)
        if kind == "default":
            for key, value in flat.items():
                if key not in COMMON and value is not None:
                    self._remark(UNREAD, f"{name}.{key}", value, "is not read: the rope is not scaled")
            return {}
        if kind != "yarn" or not yarn:
            shown = {key: value for key, value in flat.items() if key not in COMMON}
            what = "the Megatron model's rotary embedding is not scaled"
            self.changes_forward(name, {"rope_type": kind} | shown, what)
            return flat
        scaling = {key: value for key, value in flat.items() if value is not None}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        scaling.setdefault("original_max_position_embeddings", max_positions)
        self._check_yarn(name, scaling)
        return scaling

    def _check_yarn(self, name: str, scaling: Block) -> None:
        """YaRN as the two runtimes read it: what only transformers reads is not carried."""
        if "factor" not in scaling:
            self.problem("missing", f"{name}.factor")
        for key, value in scaling.items():
            if key in ("attention_factor", "truncate") and value is not True:
                what = "megatron-core's latent attention has no such number"
                self.changes_forward(f"{name}.{key}", value, what)
            elif key not in (*COMMON, *YARN, "attention_factor", "truncate"):
                self._remark(UNREAD, f"{name}.{key}", value, "is not read by anything here")
        numbers = {key: finite(scaling[key]) for key in YARN if key in scaling}
        wrong = [key for key, number in numbers.items() if number is None or number < 0]
        for key in wrong:
            self.problem(f"must be a number of at least 0, is {brief(scaling[key])}", f"{name}.{key}")
        if wrong:
            return
        theirs, ours = _attention_factors(numbers)
        if not math.isclose(theirs, ours):
            self.changes_forward(
                f"{name}.mscale",
                scaling.get("mscale"),
                f"with mscale_all_dim {scaling.get('mscale_all_dim')} transformers scales the rotary "
                f"embedding by {theirs:.6g}, megatron-core by {ours:.6g}",
            )

    def _check_numbers(self, field: str, block: Block) -> None:
        """Runtimes take the numbers of the block as they are."""
        for key, value in block.items():
            plain = value is None or isinstance(value, bool) or (isinstance(value, str) and value.isascii())
            items = value if isinstance(value, list) else [value]
            if not plain and any(finite(item) is None for item in items):
                self.problem(f"must be a finite number, is {brief(value)}", f"{field}.{key}")


def _attention_factors(numbers: Mapping[str, float | None]) -> tuple[float, float]:
    """What YaRN multiplies sine and cosine by: transformers', and that of megatron-core's latent attention.

    transformers takes ``mscale`` and ``mscale_all_dim`` together or not at all; megatron-core takes
    each, by default 1 and 0.
    """
    factor, mscale, all_dim = (numbers.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    grow = 0.1 * math.log(factor) if factor and factor > 1 else 0.0
    ours = (1 + grow * (1.0 if mscale is None else mscale)) / (1 + grow * (all_dim or 0.0))
    theirs = (1 + grow * mscale) / (1 + grow * all_dim) if mscale and all_dim else 1 + grow
    return theirs, ours
