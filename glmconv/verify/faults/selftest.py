"""Would ``verify`` see it? Each known fault is applied to the Megatron side, one at a time.

A fault is one wrong rule of a converter (``faults.py``). It has to be caught in every stage whose
tensors it changes, which also shows that errors are named with the layer that makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glmconv.basics.errors import DataError, ParityError
from glmconv.values.reader import nbytes
from glmconv.verify.faults.faults import DROPPED, FAULTS, geometry
from glmconv.verify.mcore.side import CROSS
from glmconv.verify.mcore.stages import Stage
from glmconv.verify.mcore.weights import DiskState, RelaidWeights
from glmconv.verify.measure.capture import Result
from glmconv.verify.measure.heads import Heads
from glmconv.verify.measure.report import PlaceReport, VerifyReport
from glmconv.verify.measure.streams import Clock, Outcome, place_report
from glmconv.verify.measure.verdict import place_problems
from glmconv.verify.options import VerifyOptions
from glmconv.verify.prepare import Prepared, kind_of, prepare
from glmconv.verify.run import Step
from glmconv.verify.tokens import shifted


@dataclass(slots=True)
class FaultReport:
    """One fault: ``changed`` are the stages whose tensors it makes others, ``caught`` what was seen there."""

    name: str
    description: str
    changed: list[str] = field(default_factory=list)
    caught: dict[str, list[str]] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Stages that the fault changes and where nothing was seen."""
        return [place for place in self.changed if place not in self.caught]


@dataclass(slots=True)
class SelfTestReport:
    """The outcome; faults that this model has nothing for are in ``not_applicable``."""

    model_type: str
    megatron_core: str
    faults: list[FaultReport]
    not_applicable: list[str]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every fault was caught wherever it is."""
        return all(not fault.missed for fault in self.faults)

    @property
    def exit_code(self) -> int:
        """0 where all were caught, 4 where ``verify`` is blind."""
        return 0 if self.ok else ParityError.exit_code

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "model_type": self.model_type,
            "megatron_core": self.megatron_core,
            "ok": self.ok,
            "faults": [
                {
                    "name": one.name,
                    "description": one.description,
                    "changed": one.changed,
                    "caught": one.caught,
                    "missed": one.missed,
                }
                for one in self.faults
            ],
            "not_applicable": self.not_applicable,
            "seconds": self.seconds,
            "exit_code": self.exit_code,
        }


def self_test(
    hf: Path,
    megatron: Path,
    options: VerifyOptions | None = None,
    progress: Callable[[Step], None] | None = None,
) -> SelfTestReport:
    """Apply every fault to the model in ``megatron`` and see whether it is caught.

    Memory: one layer, and where a fault takes another layer's tensors, those. Raises as ``verify``
    does, and ParityError where the two models differ to begin with.
    """
    began = time.monotonic()
    with prepare(hf, megatron, options) as prepared:
        test = _SelfTest(prepared, progress)
        test.all()
    used = [one for one in test.faults.values() if one.changed]
    idle = [one.name for one in test.faults.values() if not one.changed]
    spec, core = prepared.pair.spec, prepared.report.versions["megatron-core"]
    return SelfTestReport(spec.model_type, core, used, idle, time.monotonic() - began)


class _SelfTest:
    """Runs the Hugging Face model once; at each stage runs the Megatron stage with every fault."""

    def __init__(self, prepared: Prepared, progress: Callable[[Step], None] | None) -> None:
        self.report: VerifyReport = prepared.report
        self.pair, self.spec, self.tokens = prepared.pair, prepared.pair.spec, prepared.tokens
        self.hf, self.megatron = prepared.hf, prepared.megatron
        self.relaid = RelaidWeights(self.pair.megatron, self.report.runtime_dialect)
        self.state = DiskState(self.relaid)
        self.sizes = geometry(self.spec)
        self.faults = {one.name: FaultReport(one.name, one.description) for one in FAULTS}
        self.progress = progress
        self.done = 0
        self.bytes = sum(nbytes(one) for one in self.pair.hf.tensors.values())

    def all(self) -> None:
        """Every stage in order, each on the Hugging Face model's hidden states."""
        theirs = self._embedding()
        selected: Tensor | None = None
        for number in range(self.spec.num_layers):
            result = self._layer(number, theirs, selected)
            theirs, selected = result.hidden, result.selected
        theirs = self._head(theirs)
        for number in range(self.spec.num_mtp):
            theirs = self._mtp(number, theirs)

    def _embedding(self) -> Tensor:
        theirs = self.hf.embed(self.tokens)
        stage = self.megatron.filled("embedding")
        self._faults(
            "embedding", stage, lambda: self._compare("embedding", "", theirs, self._embedded(stage))
        )
        return theirs

    def _embedded(self, stage: Stage) -> Result:
        return Result(self.megatron.embed(self.tokens, stage))

    def _layer(self, number: int, hidden: Tensor, selected: Tensor | None) -> Result:
        with self.hf.layer(number) as run:
            theirs = run(hidden, selected)
        stage, name, kind = (
            self.megatron.filled("layer", number),
            f"layer {number}",
            kind_of(self.spec, number),
        )

        def look() -> PlaceReport:
            return self._compare(name, kind, theirs, self.megatron.run_layer(stage, number, hidden, CROSS))

        self._faults(name, stage, look)
        return theirs

    def _head(self, hidden: Tensor) -> Tensor:
        with Heads(self.hf, self.megatron, None, Clock()) as heads:
            self._faults("head", heads.stage, lambda: heads.place(hidden, hidden))
            return heads.hf_norm(hidden)

    def _mtp(self, number: int, hidden: Tensor) -> Tensor:
        embedded = self.hf.embed(shifted(self.tokens, number + 1))
        with self.hf.mtp(number) as run:
            theirs = run(embedded, hidden)
        seen = shifted(self.tokens, number)
        stage, embedding = self.megatron.filled("mtp", number), self.megatron.filled("embedding")
        name, kind = f"mtp {number}", kind_of(self.spec, self.spec.num_layers)

        def look() -> PlaceReport:
            ours = self.megatron.run_mtp(stage, embedding, seen, hidden)
            return self._compare(name, kind, theirs, ours, skip_last=number + 1)

        self._faults(name, stage, look)
        return theirs.hidden

    def _compare(
        self, name: str, kind: str, theirs: Result | Tensor, ours: Result, skip_last: int = 0
    ) -> PlaceReport:
        hf = theirs if isinstance(theirs, Result) else Result(theirs)
        return place_report(name, kind, Outcome(hf, ours, ours), self.report.bounds, skip_last=skip_last)

    def _faults(self, name: str, stage: Stage, look: Callable[[], PlaceReport]) -> None:
        """Try every fault on a filled stage, then leave it as it was."""
        places = stage.places()
        keys = {place.key for place in places.values()}
        for fault in FAULTS:
            changed = fault.changed(self.state, self.sizes, among=keys)
            if not changed:
                continue
            found = self.faults[fault.name]
            found.changed.append(name)
            if any(tensor is DROPPED for tensor in changed.values()):
                problems = self._refused(name, changed)
            else:
                _write(stage, changed)
                problems = place_problems(look(), self.report.bounds)
                _write(stage, {key: self.state[key] for key in changed})
            if problems:
                found.caught[name] = problems
        self.state.forget()
        # Last, so that a layer that shares this one's selection gets the right one.
        sound = place_problems(look(), self.report.bounds)
        if sound:
            raise ParityError(
                f"{name}: {'; '.join(sound)}",
                where=str(self.pair.unit),
                hint="the two models differ to begin with: run verify without --self-test",
            )
        self.done += 1
        if self.progress is not None:
            stages = self.spec.num_layers + 2 + self.spec.num_mtp
            self.progress(Step(self.bytes * self.done // stages, self.bytes))

    def _refused(self, name: str, dropped: dict[str, Tensor]) -> list[str]:
        """Fill the stage from a checkpoint without these keys: it has to be refused."""
        kind, _, number = name.partition(" ")
        try:
            RelaidWeights(self.pair.megatron, self.report.runtime_dialect, without=dropped).fill(
                self.megatron.stage(kind, int(number or 0))
            )
        except DataError as error:
            return [f"refused: {error.what}"]
        return []


def _write(stage: Stage, tensors: dict[str, Tensor]) -> None:
    """Put tensors, by their keys on disk, into the stage's parameters."""
    with torch.no_grad():
        for name, place in stage.places().items():
            if place.key in tensors:
                value = tensors[place.key]
                for i in place.index:
                    value = value[i]
                target = stage.tensors()[name]
                if target.shape != value.shape:
                    raise DataError(
                        f"has shape {list(value.shape)}, {list(target.shape)} is asked for", where=name
                    )
                target.copy_(value)
