"""Reading a raw ``config.json``: typed fields, all defects collected, nothing defaulted silently.

transformers' parsed configs rename and default fields, so bridges read the file itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from glmconv.brief import brief
from glmconv.dtypes import BY_TORCH_NAME
from glmconv.errors import DataError, Defect
from glmconv.spec import Moe

MAX_SIZE = (1 << 40) - 1
MAX_LAYERS = 1 << 12
MAX_MTP_LAYERS = 1 << 6
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 17
"""Limits far beyond any model (experts: of all layers together). Tables are expanded by these
numbers, so a wrong one must be an error and not hours of work or gigabytes of names."""

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Where a config says the dtype of the weights: transformers 5's name, and the earlier one."""


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

    def natural(self, *fields: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer from ``least`` to ``most``; where several of ``fields`` are set they must agree."""
        given = {field: self.config[field] for field in fields if self.has(field)}
        if not given:
            if default is None:
                self.problem("missing", " or ".join(fields))
                return least
            return default
        for field, value in given.items():
            if type(value) is not int or not least <= value <= most:
                self.problem(f"must be an integer from {least} to {most}, is {brief(value)}", field)
                return least
        if len(set(given.values())) > 1:
            self.problem(f"fields contradict each other: {given}", " and ".join(given))
        return int(next(iter(given.values())))

    def number(self, field: str, default: float | None = None, *, positive: bool = False) -> float:
        """A finite number."""
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        number = _finite(value)
        if number is None or (positive and number <= 0):
            what = "positive number" if positive else "number"
            self.problem("missing" if value is None else f"must be a {what}, is {brief(value)}", field)
            return default or 1.0
        return number

    def flag(self, field: str, default: bool) -> bool:
        value = self.config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(f"must be true or false, is {brief(value)}", field)
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
            both = f"rope_theta {brief(outer)} and rope_parameters.rope_theta {brief(inner)}"
            self.problem(f"{both} contradict", "rope_theta")
        theta = inner if inner is not None else outer
        number = _finite(theta)
        if number is None or number <= 0:
            what = "missing" if theta is None else f"must be a positive number, is {brief(theta)}"
            self.problem(what, "rope_theta")
            return 1.0
        return number

    def rope_factor(self, default: float) -> float:
        """Share of the head that rotates (``partial_rotary_factor``, either spelling)."""
        nested = self.config.get("rope_parameters")
        inner = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
        if inner is None:
            return self.number("partial_rotary_factor", default, positive=True)
        factor = _finite(inner)
        if factor is None or factor <= 0:
            self.problem(
                f"must be a positive number, is {brief(inner)}", "rope_parameters.partial_rotary_factor"
            )
            return default
        return factor

    def rope_scaling(self) -> dict[str, Any]:
        """The scaling block other than the default kind, as written."""
        for field in ("rope_parameters", "rope_scaling"):
            block = self.config.get(field)
            kind = (block.get("rope_type") or block.get("type")) if isinstance(block, dict) else None
            if isinstance(block, dict) and kind not in (None, "default"):
                self._check_scaling(field, block)
                return dict(block)
        return {}

    def _check_scaling(self, field: str, block: Mapping[str, Any]) -> None:
        """Runtimes take the numbers of the block as they are."""
        for key, value in block.items():
            plain = value is None or isinstance(value, bool) or (isinstance(value, str) and value.isascii())
            items = value if isinstance(value, list) else [value]
            if not plain and any(_finite(item) is None for item in items):
                self.problem(f"must be a finite number, is {brief(value)}", f"{field}.{key}")

    def dtype(self) -> str:
        """Torch name of the weights' dtype as the config says it; bfloat16 where it says nothing."""
        given = {name: self.config[name] for name in DTYPE_FIELDS if self.has(name)}
        names = {name: str(value).removeprefix("torch.") for name, value in given.items()}
        for name, value in names.items():
            if value not in BY_TORCH_NAME:
                self.problem(f"is not a dtype of torch: {brief(given[name])}", name)
        if len(set(names.values())) > 1:
            self.problem(f"fields contradict each other: {brief(given)}", " and ".join(given))
        return next(iter(names.values()), "bfloat16")

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


def _finite(value: Any) -> float | None:
    """The number as a float, or None where it is none, or none that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


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
    if experts * sum(moe) > MAX_EXPERTS:
        reader.problem(f"{experts} experts in {sum(moe)} layers: more than {MAX_EXPERTS:,} in all", field)
    counted = {count_experts(shapes, layer) for layer, is_moe in enumerate(moe) if is_moe} - {0}
    if counted and max(counted) != experts and len(counted) == 1:
        reader.problem(f"says {experts} experts, the files hold {max(counted)} a layer", field)


def check_routing(reader: ConfigReader, moe: Moe) -> None:
    """A router cannot choose more experts, or groups of them, than there are."""
    if reader.defects:  # numbers may be stand-ins for wrong ones
        return
    if moe.top_k > moe.num_experts:
        reader.problem(f"chooses {moe.top_k} of {moe.num_experts} experts", "num_experts_per_tok")
    reader.divides(moe.num_experts, moe.num_groups, "experts over n_group")
    if moe.top_k_groups > moe.num_groups:
        reader.problem(f"chooses {moe.top_k_groups} of {moe.num_groups} groups", "topk_group")


def sigmoid_experts(
    reader: ConfigReader, shapes: Shapes, moe_layers: tuple[bool, ...], scaling: float = 1.0
) -> Moe:
    """Experts chosen by sigmoid scores plus a learnt bias, under the field names that such configs share.

    ``scaling``: what transformers' class takes where ``routed_scaling_factor`` is absent.
    """
    experts = reader.natural("n_routed_experts", "num_experts")
    check_experts(reader, shapes, "n_routed_experts", experts, moe_layers)
    if reader.config.get("scoring_func", "sigmoid") != "sigmoid":
        reader.problem("the family's router scores by sigmoid", "scoring_func")
    ffn_size = reader.natural("moe_intermediate_size")
    moe = Moe(
        num_experts=experts,
        ffn_size=ffn_size,
        top_k=reader.natural("num_experts_per_tok"),
        shared_ffn_size=ffn_size * reader.natural("n_shared_experts", default=1, least=0),
        router_bias=True,
        score_function="sigmoid",
        num_groups=reader.natural("n_group", default=1),
        top_k_groups=reader.natural("topk_group", default=1),
        scaling=reader.number("routed_scaling_factor", scaling),
        normalise=reader.flag("norm_topk_prob", True),
    )
    check_routing(reader, moe)
    return moe
