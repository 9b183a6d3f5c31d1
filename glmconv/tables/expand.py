"""A table expanded once into exact names: which stored tensor holds which Hugging Face tensor.

After expansion only string equality is used. Every layout is described against the same space,
the hub names of Hugging Face; a conversion between two layouts is their composition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.tables.hf import Hf
from glmconv.tables.rules import Axis, Drop, Rule, Table, When
from glmconv.tables.spec import ModelSpec
from glmconv.tables.transforms import Same, Transform, stored_size


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor that the config asks for, under its hub name. ``lock``: its dtype is kept."""

    name: str
    shape: tuple[int, ...]
    lock: DType | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor's 2-D view and where it lies in a stored part's 2-D view.

    The view has ``shape[0]`` rows and ``prod(shape[1:])`` columns.
    """

    row: int
    col: int
    rows: int
    cols: int
    part_row: int
    part_col: int


@dataclass(slots=True)
class Part:
    """A stored tensor, or the element ``index`` of one with leading axes.

    ``slots``: each Hugging Face tensor in it with the boxes that it fills. ``separate``: each slot
    is a chunk of its own in a torch_dist. ``pads``: the stored tensor may have more rows.
    """

    stored: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    slots: tuple[tuple[HfTensor, tuple[Box, ...]], ...]
    transform: str
    separate: bool
    pads: bool


@dataclass(slots=True)
class Layout:
    """One layout of one model. ``axes[stored]`` are the extents of a tensor's leading axes."""

    name: str
    parts: list[Part]
    axes: dict[str, tuple[int, ...]]
    home: dict[str, Part] = field(default_factory=dict)
    stacked: bool = False

    def tensors(self) -> Iterator[HfTensor]:
        """Every Hugging Face tensor that the model consists of, in table order."""
        for part in self.parts:
            for tensor, _ in part.slots:
                yield tensor


def view2d(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor's 2-D view; a scalar is one row."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True, slots=True)
class _Block:
    """One value of the hole ``{layer}``: prefixes on both sides and the layer's number."""

    hf: str
    stored: str
    layer: int
    element: int | None
    """Number on the leading layer axis where decoder layers are stacked."""


def _prefix(axis: Axis, side: str, i: int, spec: ModelSpec) -> str:
    if side == "hf":
        return axis.hf.replace("{n}", str(spec.num_layers + i if axis.hf_after_layers else i))
    return axis.mcore.replace("{n}", str(i))


def _blocks(table: Table, spec: ModelSpec, side: str, stacked: bool) -> list[_Block]:
    blocks = []
    for i in range(spec.num_layers):
        stored = _prefix(table.layer, side, i, spec)
        if stacked:
            stored = table.layer.mcore.replace(".{n}", "")
        blocks.append(_Block(_prefix(table.layer, "hf", i, spec), stored, i, i if stacked else None))
    for i in range(spec.num_mtp):
        hf = _prefix(table.mtp_block, "hf", i, spec)
        blocks.append(_Block(hf, _prefix(table.mtp_block, side, i, spec), spec.num_layers + i, None))
    return blocks


def _wrappers(table: Table, spec: ModelSpec, side: str) -> list[_Block]:
    """Values of the hole ``{mtp}``."""
    return [
        _Block(
            _prefix(table.mtp, "hf", i, spec), _prefix(table.mtp, side, i, spec), spec.num_layers + i, None
        )
        for i in range(spec.num_mtp)
    ]


def _holds(when: tuple[When, ...], spec: ModelSpec, layer: int) -> bool:
    return all(condition.holds(spec, layer) for condition in when)


def overlaid(rules: tuple[Rule, ...], overlay: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """``rules`` with those replaced whose Hugging Face tensors an overlay row names."""
    named = {hf.name for rule in overlay for hf in rule.via.slots().values()}
    kept = tuple(r for r in rules if not any(hf.name in named for hf in r.via.slots().values()))
    return kept + overlay


def _boxes(
    via: Transform, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec
) -> tuple[dict[str, tuple[Box, ...]], tuple[int, ...]]:
    """Boxes of each slot, and the shape of the stored part."""
    axis = via.axis
    spans = via.spans({slot: shape[axis] for slot, shape in shapes.items()}, spec)
    boxes: dict[str, list[Box]] = {slot: [] for slot in shapes}
    for span in spans:
        rows, cols = view2d(shapes[span.slot])
        for start, stored, length in span.each():
            if axis == 0:
                boxes[span.slot].append(Box(start, 0, length, cols, stored, 0))
            else:
                boxes[span.slot].append(Box(0, start, rows, length, 0, stored))
    first = next(iter(shapes.values()))
    size = stored_size(spans)
    shape = (size, *first[1:]) if axis == 0 else (first[0], size, *first[2:])
    covered = sum(box.rows * box.cols for slot in boxes.values() for box in slot)
    if covered != sum(prod(shape) for shape in shapes.values()):
        raise DataError(
            f"{type(via).__name__} does not cover its tensors: {dict(shapes)}",
            hint="sizes in config.json contradict each other",
        )
    return {slot: tuple(found) for slot, found in boxes.items()}, shape


class _Expander:
    """Expands rules for one side (``hf`` or ``mcore``) of one model."""

    def __init__(self, table: Table, spec: ModelSpec, side: str, stacked: bool) -> None:
        self.spec = spec
        self.blocks = _blocks(table, spec, side, stacked)
        self.wrappers = _wrappers(table, spec, side)
        self.parts: list[Part] = []
        self.axes: dict[str, tuple[int, ...]] = {}

    def add(self, rule: Rule) -> None:
        names = [hf.name for hf in rule.via.slots().values()]
        hole = "{layer}" if "{layer}" in names[0] else "{mtp}" if "{mtp}" in names[0] else ""
        blocks = {"{layer}": self.blocks, "{mtp}": self.wrappers, "": [_Block("", "", 0, None)]}[hole]
        wanted = [block for block in blocks if _holds(rule.when, self.spec, block.layer)]
        if not wanted:
            return
        slots = rule.via.slots()
        shapes = {slot: tuple(dim.of(self.spec) for dim in hf.dims) for slot, hf in slots.items()}
        boxes, shape = _boxes(rule.via, shapes, self.spec)
        experts = self.spec.moe.num_experts if self.spec.moe and "{expert}" in names[0] else None
        stored, by_expert = rule.stored.removesuffix("[{expert}]"), rule.stored.endswith("[{expert}]")
        for block in wanted:
            name = stored.replace(hole, block.stored) if hole else stored
            axes = () if block.element is None else (self.spec.num_layers,)
            if by_expert and experts is not None:
                axes = (*axes, experts)
            bases = {slot: hf.name.replace(hole, block.hf) if hole else hf.name for slot, hf in slots.items()}
            index = () if block.element is None else (block.element,)
            for expert in [None] if experts is None else range(experts):
                exact = name if expert is None else name.replace("{expert}", str(expert))
                at = (*index, expert) if by_expert and expert is not None else index
                self.axes[exact] = axes
                self.parts.append(
                    Part(
                        stored=exact,
                        index=at,
                        shape=shape,
                        slots=_filled(slots, bases, shapes, boxes, expert),
                        transform=type(rule.via).__name__,
                        separate=rule.via.separate,
                        pads=rule.via.pads,
                    )
                )


def _filled(
    slots: Mapping[str, Hf],
    bases: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    boxes: Mapping[str, tuple[Box, ...]],
    expert: int | None,
) -> tuple[tuple[HfTensor, tuple[Box, ...]], ...]:
    filled = []
    for slot, hf in slots.items():
        exact = bases[slot] if expert is None else bases[slot].replace("{expert}", str(expert))
        filled.append((HfTensor(exact, shapes[slot], hf.lock), boxes[slot]))
    return tuple(filled)


def stacks_layers(table: Table, spec: ModelSpec, dialect: str) -> bool:
    """Whether trainers of this dialect store the decoder's layers as one tensor.

    They do where all layers are alike (``torch_dist.md`` section 2).
    """
    return dialect in table.stacked_layers and len({spec.is_moe(i) for i in range(spec.num_layers)}) == 1


def _finish(name: str, expander: _Expander, stacked: bool) -> Layout:
    layout = Layout(name, expander.parts, expander.axes, stacked=stacked)
    for part in layout.parts:
        for tensor, _ in part.slots:
            if tensor.name in layout.home:
                raise DataError("two rules of the table hold the same tensor", where=tensor.name)
            layout.home[tensor.name] = part
    return layout


def megatron_layout(table: Table, spec: ModelSpec, dialect: str, stacked: bool | None = None) -> Layout:
    """Expand the table for a torch_dist dialect; ``stacked`` overrides the dialect's own habit."""
    if stacked is None:
        stacked = stacks_layers(table, spec, dialect)
    expander = _Expander(table, spec, "mcore", stacked)
    for rule in overlaid(table.rules, table.overlays.get(dialect, ())):
        expander.add(rule)
    return _finish(dialect, expander, stacked)


def _plain(rules: Iterable[Rule]) -> Iterator[Rule]:
    """One ``Same`` row for each Hugging Face tensor of the table: hub names as they are."""
    for rule in rules:
        for hf in rule.via.slots().values():
            yield Rule(hf.name, Same(hf), rule.when)


def hf_layout(table: Table, spec: ModelSpec, *, stacked_experts: bool = False) -> Layout:
    """Expand the table for safetensors: hub names, or transformers' stacked experts."""
    rules = tuple(_plain(table.rules))
    expander = _Expander(table, spec, "hf", False)
    for rule in overlaid(rules, table.hf_stacked if stacked_experts else ()):
        expander.add(rule)
    return _finish("hf-stacked" if stacked_experts else "hf", expander, False)


def expand_drops(table: Table, spec: ModelSpec) -> dict[str, Drop]:
    """Exact names of the droppable tensors."""
    return {name: drop for drop in table.drops for name in _names(drop.name, drop.when, table, spec)}


def expand_tied(table: Table, spec: ModelSpec) -> dict[str, str]:
    """Exact names of duplicates, each with the tensor whose bytes it repeats."""
    return {name: tied.to for tied in table.tied for name in _names(tied.name, tied.when, table, spec)}


def _names(name: str, when: tuple[When, ...], table: Table, spec: ModelSpec) -> Iterator[str]:
    for hole, blocks in (
        ("{layer}", _blocks(table, spec, "hf", False)),
        ("{mtp}", _wrappers(table, spec, "hf")),
    ):
        if hole in name:
            yield from (name.replace(hole, block.hf) for block in blocks if _holds(when, spec, block.layer))
            return
    if _holds(when, spec, 0):
        yield name
