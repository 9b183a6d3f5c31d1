"""Short notation for long lists of tensor names: ``model.layers.{3-77}.mlp.experts.{0-255}.x``.

A hole ``{...}`` holds numbers and ranges (``{0-2,6,10}``); several holes multiply.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

HOLE = re.compile(r"\{([\d,-]+)\}")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

TensorInfo = tuple[tuple[int, ...], str]
"""Shape and safetensors dtype name."""


def expand(patterns: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorInfo]:
    """Every name of the patterns with its shape and dtype. Raises ``ValueError`` on a duplicate."""
    tensors: dict[str, TensorInfo] = {}
    for pattern, entry in patterns.items():
        info = (tuple(entry["shape"]), str(entry["dtype"]))
        for name in expand_pattern(pattern):
            if name in tensors:
                raise ValueError(f"{name} is named twice, again by {pattern}")
            tensors[name] = info
    return tensors


def expand_pattern(pattern: str) -> Iterator[str]:
    """The names that one pattern stands for, in numeric order."""
    holes = [[str(number) for number in _numbers(hole)] for hole in HOLE.findall(pattern)]
    template = HOLE.sub("{}", pattern)
    for numbers in itertools.product(*holes):
        yield template.format(*numbers)


def compress(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """The inverse of :func:`expand`: few patterns for many names. At most two numbers a name."""
    groups: dict[tuple[str, TensorInfo], list[tuple[int, ...]]] = defaultdict(list)
    for name, info in tensors.items():
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        groups[NUMBER.sub("{}", name), info].append(numbers)
    patterns = {}
    for (template, (shape, dtype)), numbers_list in groups.items():
        for holes in _products(numbers_list):
            patterns[template.format(*holes)] = {"shape": list(shape), "dtype": dtype}
    return patterns


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _products(numbers_list: list[tuple[int, ...]]) -> list[list[str]]:
    """Hole texts that together cover the tuples: one list of holes per product of ranges."""
    if not numbers_list[0]:
        return [[]]
    if len(numbers_list[0]) == 1:
        return [[_hole([numbers[0] for numbers in numbers_list])]]
    by_first: dict[int, list[int]] = defaultdict(list)
    for first, second in numbers_list:
        by_first[first].append(second)
    by_second: dict[str, list[int]] = defaultdict(list)
    for first, seconds in by_first.items():
        by_second[_hole(seconds)].append(first)
    return [[_hole(firsts), second] for second, firsts in by_second.items()]


def _hole(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def _numbers(hole: str) -> list[int]:
    numbers: list[int] = []
    for part in hole.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
