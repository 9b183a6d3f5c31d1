"""What lies in a checkpoint's files, and where each Hugging Face tensor is found in it.

Both kinds of checkpoint come down to stored tensors made of chunks; :func:`locate` turns the
chunks of a layout's parts into pieces of Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect
from glmconv.formats.stored import StoredTensor
from glmconv.source.conditions import Blank, Dropped
from glmconv.tables.expand import Box, HfTensor, Layout, Part, view2d


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a tensor's 2-D view in a source file, its rows ``row_stride`` bytes apart."""

    file: int
    offset: int
    row: int
    col: int
    rows: int
    cols: int
    row_stride: int


@dataclass(slots=True)
class Located:
    """A Hugging Face tensor as the source holds it. ``pieces`` cover it exactly.

    ``zeros``: no file holds it and all its elements are zero; it has no pieces then.
    """

    tensor: HfTensor
    dtype: DType
    pieces: tuple[Piece, ...]
    zeros: bool = False


@dataclass(slots=True)
class Found:
    """The outcome of :func:`locate`; ``defects`` lists everything wrong at once."""

    tensors: dict[str, Located] = field(default_factory=dict)
    missing: list[HfTensor] = field(default_factory=list)
    unused: dict[str, StoredTensor] = field(default_factory=dict)
    padding: list[Dropped] = field(default_factory=list)
    blank: list[Blank] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)


@dataclass(slots=True)
class _View:
    """The element ``index`` of a stored tensor, as pieces in the part's own 2-D view."""

    dtype: DType
    pieces: list[Piece]


def _elements(tensor: StoredTensor, lead: int) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Each chunk cut along the ``lead`` leading axes, as a piece of one element's 2-D view."""
    inner = prod(tensor.shape[lead + 1 :]) if len(tensor.shape) > lead else 1
    size = tensor.dtype.itemsize
    tail = prod(tensor.shape[lead + 2 :])
    for chunk in tensor.chunks:
        ranges = [range(o, o + s) for o, s in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)]
        body, start = chunk.sizes[lead:], chunk.offsets[lead:]
        rows, cols = view2d(body)
        row = start[0] if start else 0
        col = start[1] * tail if len(start) > 1 else 0
        if cols > inner:
            raise ValueError(f"chunk of {tensor.name} is wider than the tensor")
        step = rows * cols * size
        for number, index in enumerate(product(*ranges)):
            yield index, Piece(chunk.file, chunk.offset + number * step, row, col, rows, cols, cols * size)


def cuts_inner_axes(tensor: StoredTensor, lead: int) -> bool:
    """Whether a chunk is cut along a third or later axis, which no trainer does."""
    return any(chunk.sizes[lead + 2 :] != tensor.shape[lead + 2 :] for chunk in tensor.chunks)


def _through(box: Box, piece: Piece, itemsize: int) -> Piece | None:
    """The piece of the Hugging Face tensor where a stored piece and a part's box overlap."""
    top, bottom = max(box.part_row, piece.row), min(box.part_row + box.rows, piece.row + piece.rows)
    left, right = max(box.part_col, piece.col), min(box.part_col + box.cols, piece.col + piece.cols)
    if top >= bottom or left >= right:
        return None
    offset = piece.offset + (top - piece.row) * piece.row_stride + (left - piece.col) * itemsize
    return Piece(
        piece.file,
        offset,
        box.row + top - box.part_row,
        box.col + left - box.part_col,
        bottom - top,
        right - left,
        piece.row_stride,
    )


class _Locator:
    """Finds tensors in one checkpoint; views of stored tensors are made once."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.views: dict[str, dict[tuple[int, ...], _View]] = {}
        self.used: dict[str, int] = {}
        self.bad: dict[str, Defect] = {}
        self.padded: dict[str, Part] = {}
        self.holes: list[Defect] = []

    def _open(self, layout: Layout, part: Part) -> bool:
        """Check the stored tensor's shape and index its chunks; False where it is wrong."""
        name = part.stored
        if name in self.views:
            return True
        if name in self.bad:
            return False
        tensor, axes = self.stored[name], layout.axes[name]
        want = (*axes, *part.shape)
        lead = len(axes)
        fits = tensor.shape == want
        if part.pads and len(tensor.shape) == len(want) and tensor.shape[1:] == want[1:]:
            fits = tensor.shape[0] >= want[0]
            self.padded[name] = part
        if not fits or cuts_inner_axes(tensor, lead):
            self.bad[name] = _shape_defect(tensor, want, part)
            return False
        views: dict[tuple[int, ...], _View] = {}
        for index, piece in _elements(tensor, lead):
            views.setdefault(index, _View(tensor.dtype, [])).pieces.append(piece)
        self.views[name] = views
        self.used[name] = 0
        return True

    def _plain(self, part: Part, tensor: HfTensor) -> Located | None:
        """The common case, quickly: the same tensor in one chunk (60,000 of them in a big model)."""
        stored = self.stored[part.stored]
        if part.transform != "Same" or stored.shape != tensor.shape or len(stored.chunks) != 1:
            return None
        chunk = stored.chunks[0]
        if chunk.sizes != stored.shape:
            return None
        rows, cols = view2d(stored.shape)
        size = stored.dtype.itemsize
        self.used[part.stored] = rows * cols * size
        return Located(
            tensor, stored.dtype, (Piece(chunk.file, chunk.offset, 0, 0, rows, cols, cols * size),)
        )

    def padding(self, part: Part) -> Iterator[Blank]:
        """Where the rows past a padded part's own lie: only zeros may be dropped as padding."""
        stored = self.stored[part.stored]
        rows, cols = view2d(part.shape)
        past = Box(0, 0, stored.shape[0] - rows, cols, rows, 0)
        for view in self.views[part.stored].values():
            for held in view.pieces:
                piece = _through(past, held, view.dtype.itemsize)
                if piece is not None:
                    run = piece.cols * view.dtype.itemsize
                    yield Blank(part.stored, piece.file, piece.offset, run, piece.rows, piece.row_stride)

    def find(self, layout: Layout, tensor: HfTensor) -> Located | None:
        part = layout.home[tensor.name]
        plain = self._plain(part, tensor)
        if plain is not None:
            return plain
        if not self._open(layout, part):
            return None
        view = self.views[part.stored].get(part.index)
        if view is None:
            self.holes.append(
                Defect("missing", f"element {list(part.index)} is not in the file", part.stored)
            )
            return None
        boxes = next(boxes for held, boxes in part.slots if held.name == tensor.name)
        size = view.dtype.itemsize
        pieces = []
        for box in boxes:
            for stored_piece in view.pieces:
                piece = _through(box, stored_piece, size)
                if piece is not None:
                    pieces.append(piece)
                    self.used[part.stored] += piece.rows * piece.cols * size
        return Located(tensor, view.dtype, tuple(pieces))


def _shape_defect(tensor: StoredTensor, want: tuple[int, ...], part: Part) -> Defect:
    hint = "config.json and the file disagree; is this the config of another model?"
    if len(tensor.shape) == len(want) and tensor.shape[-2:] == want[-2:][::-1]:
        hint = "the last two axes are exchanged: the tensor is stored transposed"
    elif tensor.shape[:-2] != want[:-2] and tensor.shape[-2:] == want[-2:]:
        hint = "the number of experts or layers differs from config.json"
    return Defect(
        "shape",
        f"has shape {list(tensor.shape)}, config.json asks for {list(want)} ({part.transform})",
        tensor.name,
        hint,
    )


def locate(layouts: Iterable[Layout], stored: Mapping[str, StoredTensor]) -> Found:
    """Find every tensor of a model in a checkpoint.

    ``layouts`` are alternatives for one model, tried in order for each tensor (an HF checkpoint may
    hold some experts stacked, some not). Missing, unused, ill-shaped and padded tensors are
    reported, not raised: the caller decides what is allowed.
    """
    found, locator = Found(), _Locator(stored)
    alternatives = list(layouts)
    for tensor in alternatives[0].tensors():
        layout = next((one for one in alternatives if one.home[tensor.name].stored in stored), None)
        if layout is None:
            found.missing.append(tensor)
            continue
        located = locator.find(layout, tensor)
        if located is not None:
            found.tensors[tensor.name] = located
    found.defects += [*locator.bad.values(), *locator.holes]
    found.unused = {
        name: one for name, one in stored.items() if name not in locator.used and name not in locator.bad
    }
    for name, used in locator.used.items():
        rest = stored[name].nbytes - used
        if rest and name in locator.padded:
            found.padding.append(Dropped(name, f"padding rows of the vocabulary ({rest:,} bytes)", rest))
            found.blank += locator.padding(locator.padded[name])
        elif rest:
            found.defects.append(
                Defect("unused-bytes", f"{rest:,} of its bytes belong to no tensor of the model", name)
            )
    return found
