"""Whether two configs describe the same model, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from glmconv.tables.config_fields import CHANGES_FORWARD
from glmconv.tables.spec import ModelSpec

FORWARD_ONLY = frozenset(
    {
        *("norm_eps", "rope.theta", "rope.partial_factor", "rope.interleaved", "rope.scaling"),
        *("moe.top_k", "moe.score_function", "moe.num_groups", "moe.top_k_groups", "moe.scaling"),
        *("moe.normalise", "dsa.top_k", "dsa.freq", "dsa.offset"),
    }
)
"""What changes the forward pass and moves no tensor."""

NOT_COMPARED = frozenset({"raw", "remarks", "dtype", "max_positions"})
"""The config's text; dtypes, which are judged tensor by tensor; a limit, not a number of the maths."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of two specs. ``moves``: tensors have other names, shapes or rows by it."""

    name: str
    left: Any
    right: Any
    moves: bool

    def __str__(self) -> str:
        if isinstance(self.left, tuple) and isinstance(self.right, tuple):
            pairs = zip(self.left, self.right, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                return f"{self.name} of layer {first}: {self.left[first]} and {self.right[first]}"
        return f"{self.name}: {_text(self.left)} and {_text(self.right)}"


def _text(value: Any) -> str:
    return type(value).__name__ if is_dataclass(value) else str(value)


def differences(left: ModelSpec, right: ModelSpec) -> list[Difference]:
    """Every number that shapes or moves tensors, or changes the forward pass, and is not the same."""
    return [*_differences("", left, right), *_unlike_remarks(left, right)]


def _unlike_remarks(left: ModelSpec, right: ModelSpec) -> Iterator[Difference]:
    """What the configs say of the forward pass beyond the spec's numbers."""
    said, other = (
        {one.what for one in spec.remarks if one.kind == CHANGES_FORWARD} for spec in (left, right)
    )
    for what in sorted(said ^ other):
        yield Difference(what, what in said, what in other, moves=False)


def _differences(prefix: str, left: Any, right: Any) -> Iterator[Difference]:
    for field in fields(left):
        name = f"{prefix}{field.name}"
        one, other = getattr(left, field.name), getattr(right, field.name)
        if name in NOT_COMPARED or one == other:
            continue
        if is_dataclass(one) and is_dataclass(other):
            yield from _differences(f"{name}.", one, other)
        else:
            yield Difference(name, one, other, name not in FORWARD_ONLY)
