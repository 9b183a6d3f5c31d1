"""Whether the chunks of a tensor cover it exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import add, gt

from glmconv.formats.torchdist.entries import TensorEntry

MAX_PIECES = 4_000_000
"""Pieces that a check may cut the chunks of one tensor into; a grid of n chunks makes n a dimension."""

Box = tuple[tuple[int, ...], tuple[int, ...]]


def fault_of(entry: TensorEntry) -> str:
    """What is wrong with the chunks of a tensor; empty if they cover each element once."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    if len(boxes) == 1 and boxes[0][1] == entry.shape and not any(boxes[0][0]):
        return ""
    for box in boxes:
        if not _fits(box, entry.shape):
            return f"chunk at {list(box[0])} of size {list(box[1])} leaves the shape {list(entry.shape)}"
    covered, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(entry.shape)
    if covered < whole:
        return f"its {len(boxes)} chunks cover at most {covered} of {whole} elements"
    try:
        overlap = _overlap([box for box in boxes if math.prod(box[1])], len(entry.shape))
    except OverflowError:
        return f"its {len(boxes)} chunks are cut too irregularly to be checked"
    return f"its chunks at {list(overlap[0])} and {list(overlap[1])} overlap" if overlap else ""


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    offsets, sizes = box
    if len(offsets) != len(shape) or len(sizes) != len(shape) or min(offsets + sizes, default=0) < 0:
        return False
    return not any(map(gt, map(add, offsets, sizes), shape))


def _overlap(boxes: Sequence[Box], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets of two boxes that share an element.

    Cuts the boxes into slabs at every border along the first dimension, then each slab along the
    next. Boxes that are left together after the last dimension overlap.
    """
    groups = [list(boxes)]
    pieces = len(boxes)
    for dim in range(rank):
        cut: list[list[Box]] = []
        for group in groups:
            if len(group) == 1:
                continue
            slabs = _slabs(group, dim, MAX_PIECES - pieces)
            pieces += sum(map(len, slabs)) - len(group)
            cut += slabs
        groups = cut
    for group in groups:
        if len(group) > 1:
            return group[0][0], group[1][0]
    return None


def _slabs(group: Sequence[Box], dim: int, budget: int) -> list[list[Box]]:
    """The boxes of each slab between two borders along ``dim``; a box may lie in many."""
    spans: dict[tuple[int, int], list[Box]] = {}
    for box in group:
        start = box[0][dim]
        spans.setdefault((start, start + box[1][dim]), []).append(box)
    ordered = sorted(spans)
    if all(span[1] <= following[0] for span, following in pairwise(ordered)):
        return list(spans.values())
    borders = sorted({border for span in ordered for border in span})
    number = {border: index for index, border in enumerate(borders)}
    slabs: list[list[Box]] = [[] for _ in borders]
    for (start, end), boxes in spans.items():
        first, last = number[start], number[end]
        budget -= (last - first - 1) * len(boxes)
        if budget < 0:
            raise OverflowError
        for slab in slabs[first:last]:
            slab.extend(boxes)
    return [slab for slab in slabs if slab]
