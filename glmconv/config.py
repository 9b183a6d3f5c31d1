"""Reading a raw ``config.json``: typed fields, all defects collected, nothing defaulted silently.

transformers' parsed configs rename and default fields, so bridges read the file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from glmconv.errors import DataError, Defect


class ConfigReader:
    """Typed access to a config; call :meth:`finish` once all fields were read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.defects: list[Defect] = []

    def problem(self, what: str, field: str, hint: str = "") -> None:
        """Note a defect of ``field``."""
        self.defects.append(Defect("config", what, f"config.json: {field}", hint))

    def has(self, field: str) -> bool:
        return self.config.get(field) is not None

    def natural(self, *fields: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``; where several of ``fields`` are set they must agree."""
        given = {field: self.config[field] for field in fields if self.has(field)}
        if not given:
            if default is None:
                self.problem("missing", " or ".join(fields))
                return least
            return default
        for field, value in given.items():
            if type(value) is not int or value < least or value >= 1 << 40:
                self.problem(f"must be an integer of at least {least}, is {value!r}", field)
                return least
        if len(set(given.values())) > 1:
            self.problem(f"fields contradict each other: {given}", " and ".join(given))
        return int(next(iter(given.values())))

    def number(self, field: str, default: float | None = None) -> float:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.problem("missing" if value is None else f"must be a number, is {value!r}", field)
            return default or 1.0
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(f"must be true or false, is {value!r}", field)
            return default
        return value

    def words(self, field: str, length: int, allowed: Iterable[str]) -> list[str] | None:
        """A list of ``length`` words, or None where the field is absent."""
        value = self.config.get(field)
        if value is None:
            return None
        known = set(allowed)
        if not isinstance(value, list) or not all(isinstance(word, str) and word in known for word in value):
            self.problem(f"must be a list of {sorted(known)}", field)
            return None
        if len(value) != length:
            self.problem(f"has {len(value)} entries for {length} layers", field)
            return None
        return value

    def rope_theta(self) -> float:
        """Base of the rotary embedding; never defaulted, since a wrong one loses quality silently.

        transformers 5 writes ``rope_parameters.rope_theta``, earlier ones ``rope_theta``.
        """
        nested = self.config.get("rope_parameters")
        inner = nested.get("rope_theta") if isinstance(nested, dict) else None
        outer = self.config.get("rope_theta")
        if inner is not None and outer is not None and inner != outer:
            self.problem(
                f"rope_theta {outer} and rope_parameters.rope_theta {inner} contradict", "rope_theta"
            )
        theta = inner if inner is not None else outer
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or theta <= 0:
            self.problem("missing" if theta is None else f"must be positive, is {theta!r}", "rope_theta")
            return 1.0
        return float(theta)

    def rope_factor(self, default: float) -> float:
        """Share of the head that rotates (``partial_rotary_factor``, either spelling)."""
        nested = self.config.get("rope_parameters")
        if isinstance(nested, dict) and nested.get("partial_rotary_factor") is not None:
            return float(nested["partial_rotary_factor"])
        return self.number("partial_rotary_factor", default)

    def rope_scaling(self) -> dict[str, Any]:
        """The scaling block other than the default kind, as written."""
        for field in ("rope_parameters", "rope_scaling"):
            block = self.config.get(field)
            kind = (block.get("rope_type") or block.get("type")) if isinstance(block, dict) else None
            if isinstance(block, dict) and kind not in (None, "default"):
                return dict(block)
        return {}

    def dtype(self) -> str:
        """Torch name of the weights' dtype as the config says it."""
        value = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        return str(value).removeprefix("torch.")

    def divides(self, whole: int, part: int, what: str) -> None:
        if part and whole % part:
            self.problem(f"{whole} is not a multiple of {part}", what)

    def finish(self) -> None:
        """Raise DataError listing every defect noted so far."""
        if self.defects:
            raise DataError(
                "config.json cannot be understood",
                defects=self.defects,
                hint="compare with the released config of this model",
            )


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors that an HF checkpoint holds; empty where the source is not HF."""


def count_mtp_layers(shapes: Shapes, num_layers: int) -> int:
    """MTP layers in the files: numbers from ``num_layers`` on that own an ``enorm``."""
    count = 0
    while f"model.layers.{num_layers + count}.enorm.weight" in shapes:
        count += 1
    return count


def count_experts(shapes: Shapes, layer: int) -> int:
    """Experts of one layer in the files, per expert or stacked; 0 where the layer has none."""
    prefix = f"model.layers.{layer}.mlp.experts."
    stacked = shapes.get(prefix + "gate_up_proj")
    if stacked:
        return stacked[0]
    count = 0
    while f"{prefix}{count}.gate_proj.weight" in shapes:
        count += 1
    return count


def check_experts(
    reader: ConfigReader, shapes: Shapes, field: str, experts: int, moe: tuple[bool, ...]
) -> None:
    """Compare the config's number of experts with the files' (a stale default has misled loaders)."""
    counted = {count_experts(shapes, layer) for layer, is_moe in enumerate(moe) if is_moe} - {0}
    if counted and max(counted) != experts and len(counted) == 1:
        reader.problem(f"says {experts} experts, the files hold {max(counted)} a layer", field)
