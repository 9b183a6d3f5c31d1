"""Compare two checkpoints tensor by tensor, across layouts and dialects: both in Hugging Face names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmconv.basics.errors import DataError, Defect
from glmconv.basics.threads import Meter, OnStep, work_through
from glmconv.engine import check_conditions
from glmconv.plan.plan import Plan
from glmconv.source.locate import Located
from glmconv.source.open import open_source
from glmconv.source.source import Source, SourceOptions, describe_layout
from glmconv.tables.expand import expand_drops, expand_tied
from glmconv.tables.rules import Drop
from glmconv.values.differences import (
    EQUAL,
    EXTRA,
    MISSING,
    NOT_HELD,
    STATUSES,
    WIDENED,
    Difference,
    compare,
)
from glmconv.values.reader import Reader, nbytes, stored_view

COMPARED = ("missing", "unexpected", "duplicate")
"""Kinds of defects that show as differences of tensors, or are none where both sides agree."""


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How each side is to be understood, and how many threads read."""

    a: SourceOptions = field(default_factory=SourceOptions)
    b: SourceOptions = field(default_factory=SourceOptions)
    workers: int = 2


@dataclass(slots=True)
class DiffReport:
    """The outcome. ``defects_a`` and ``defects_b`` are what is wrong with a side by itself."""

    a: Path
    b: Path
    layouts: tuple[str, str]
    model_types: tuple[str, str]
    tensors: list[Difference]
    config: list[str]
    defects_a: list[Defect]
    defects_b: list[Defect]
    bytes_read: int
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        sound = not self.defects_a and not self.defects_b
        return sound and all(one.status in (EQUAL, WIDENED, NOT_HELD) for one in self.tensors)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def count(self, status: str) -> int:
        """Number of tensors of one status."""
        return sum(one.status == status for one in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``: all tensors that are not equal."""
        return {
            "a": {"path": str(self.a), "layout": self.layouts[0], "model_type": self.model_types[0]},
            "b": {"path": str(self.b), "layout": self.layouts[1], "model_type": self.model_types[1]},
            "equal": self.equal,
            "counts": {s: self.count(s) for s in STATUSES},
            "tensors": [one.to_json() for one in self.tensors if one.status != EQUAL or one.note],
            "config": self.config,
            "defects": {
                "a": [str(one) for one in self.defects_a],
                "b": [str(one) for one in self.defects_b],
            },
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class _Side:
    """Everything that one checkpoint holds, in Hugging Face names where it has them."""

    source: Source
    tensors: dict[str, Located]
    tied: dict[str, str]
    drops: dict[str, Drop]

    def loses(self, name: str) -> str:
        """Why the tables drop a tensor of the other side on the way to this one, or nothing."""
        if self.source.kind != "megatron" or name not in self.drops:
            return ""
        return self.drops[name].reason


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    a: Located
    b: Located
    note: str = ""


def diff(a: Path, b: Path, options: DiffOptions | None = None, progress: OnStep | None = None) -> DiffReport:
    """Compare the checkpoints at ``a`` and ``b``; nothing is written.

    A duplicate that one side stores and the other does not (a tied head, the copies inside an MTP
    layer) is compared with the tensor that it repeats. Raises StorageError, UsageError, or DataError
    for a checkpoint that cannot be opened at all.
    """
    began, options = time.monotonic(), options or DiffOptions()
    left, right = _side(Path(a), options.a), _side(Path(b), options.b)
    pairs, alone = _match(left, right)
    alone += [*_beyond(left.source, MISSING), *_beyond(right.source, EXTRA)]
    pairs.sort(key=lambda pair: _place(pair.a))
    meter = Meter(sum(nbytes(pair.a) + nbytes(pair.b) for pair in pairs), progress)

    @contextmanager
    def readers() -> Iterator[tuple[Reader, Reader]]:
        with Reader(left.source.files) as first, Reader(right.source.files) as second:
            yield first, second

    def one(state: tuple[Reader, Reader], pair: _Pair) -> Difference:
        return compare(state, pair.a, pair.b, pair.name, meter, pair.note)

    compared = work_through(pairs, readers, one, options.workers)
    order = {name: i for i, name in enumerate(dict.fromkeys((*left.tensors, *right.tensors)))}
    tensors = sorted([*compared, *alone], key=lambda found: order.get(found.name, len(order)))
    return DiffReport(
        a=Path(a),
        b=Path(b),
        layouts=(describe_layout(left.source), describe_layout(right.source)),
        model_types=(left.source.spec.model_type, right.source.spec.model_type),
        tensors=tensors,
        config=_config_differences(left.source.config, right.source.config),
        defects_a=[defect for defect in left.source.defects if defect.kind not in COMPARED],
        defects_b=[defect for defect in right.source.defects if defect.kind not in COMPARED],
        bytes_read=meter.done,
        seconds=time.monotonic() - began,
    )


def _beyond(source: Source, status: str) -> Iterator[Difference]:
    """Rows past the vocabulary that are not zero: values that only this side has."""
    plan = Plan(source.files, [])
    for name in sorted({blank.name for blank in source.blank}):
        plan.conditions = [blank for blank in source.blank if blank.name == name]
        try:
            check_conditions(plan)
        except DataError as error:
            stored = source.stored[name]
            shape, label, none = list(stored.shape), stored.dtype.label, list[int]()
            in_a = status == MISSING
            dtypes, shapes = ((label, ""), (shape, none)) if in_a else (("", label), (none, shape))
            yield Difference(name, status, dtypes, shapes, note=error.what)


def _side(path: Path, options: SourceOptions) -> _Side:
    source = open_source(path, options)
    tensors = dict(source.tensors)
    tied, drops = expand_tied(source.table, source.spec), expand_drops(source.table, source.spec)
    # Duplicates, dropped and faulty tensors are compared too, under the names that they have.
    kinds = ("unexpected",) if source.kind == "megatron" else ("unexpected", "duplicate", "shape")
    others = {defect.where for defect in source.defects if defect.kind in kinds}
    others |= {equal.name for equal in source.equal if equal.name in tied} | drops.keys()
    for name in others & source.stored.keys():
        tensors.setdefault(name, stored_view(source.stored[name]))
    return _Side(source, tensors, tied, drops)


def _match(left: _Side, right: _Side) -> tuple[list[_Pair], list[Difference]]:
    pairs, alone = [], []
    for name, here in left.tensors.items():
        there = right.tensors.get(name)
        note = ""
        if there is None and name in left.tied:
            there = right.tensors.get(left.tied[name])
            note = f"B holds it once, as {left.tied[name]}"
        if there is None:
            alone.append(_lonely(name, MISSING, here, right.loses(name)))
        else:
            pairs.append(_Pair(name, here, there, note))
    for name, there in right.tensors.items():
        if name in left.tensors:
            continue
        here_too = left.tensors.get(right.tied[name]) if name in right.tied else None
        if here_too is None:
            alone.append(_lonely(name, EXTRA, there, left.loses(name)))
        else:
            pairs.append(_Pair(name, here_too, there, f"A holds it once, as {right.tied[name]}"))
    return pairs, alone


def _lonely(name: str, status: str, located: Located, reason: str) -> Difference:
    shape, label = list(located.tensor.shape), located.dtype.label
    dtypes, shapes = ((label, ""), (shape, [])) if status == MISSING else (("", label), ([], shape))
    note = reason or ("only in A" if status == MISSING else "only in B")
    return Difference(name, NOT_HELD if reason else status, dtypes, shapes, note=note)


def _place(located: Located) -> tuple[int, int]:
    return (located.pieces[0].file, located.pieces[0].offset) if located.pieces else (-1, 0)


def _config_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Top-level fields of ``config.json`` that differ; they say why, and are not part of the verdict."""
    names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    return [f"{name}: {_brief(a.get(name))} in A, {_brief(b.get(name))} in B" for name in names]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
