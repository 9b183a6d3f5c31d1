"""Run both real models side by side, one layer at a time, and compare.

The Hugging Face model is transformers' own, the Megatron model megatron-core's own. A layer of
one side is loaded, run and dropped before the other side's, so memory holds one of them. Each
side runs on its own hidden states, which gives the figures of the whole models, and on the other
side's, which pins an error to the layer that makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glmconv.values.reader import nbytes
from glmconv.verify.mcore.side import CROSS, OWN
from glmconv.verify.measure.capture import Result
from glmconv.verify.measure.footprint import Footprint
from glmconv.verify.measure.heads import Heads, Hiddens
from glmconv.verify.measure.report import PlaceReport, Predictions, VerifyReport
from glmconv.verify.measure.streams import Clock, Outcome, place_report
from glmconv.verify.measure.verdict import judge
from glmconv.verify.options import VerifyOptions
from glmconv.verify.prepare import Prepared, kind_of, prepare
from glmconv.verify.tokens import shifted


@dataclass(slots=True)
class Step:
    """Progress: bytes of weights compared so far, and in all."""

    done: int
    total: int


def verify(
    hf: Path,
    megatron: Path,
    options: VerifyOptions | None = None,
    progress: Callable[[Step], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Run the model in ``hf`` and the one in ``megatron`` on the same tokens and compare.

    Raises UsageError for missing packages or options without meaning, DataError for checkpoints
    that are broken or of different models, StorageError beyond ``max_memory``. A failed parity is
    in the report, not raised. ``warn`` gets the report's warnings before anything runs.
    """
    began = time.monotonic()
    with prepare(hf, megatron, options) as prepared:
        report, device = prepared.report, prepared.tokens.device.type
        if warn is not None:
            for warning in report.warnings:
                warn(warning)
        limit = options.max_memory if options is not None and device == "cpu" else None
        with Footprint(limit, prepared.opened) as footprint:
            Run(prepared, footprint, progress).all()
        lines = prepared.megatron.alignments.items()
        report.alignments = [f"{what} ({count} layers)" for what, count in lines]
        report.peak_memory = footprint.peak
        report.peak_gpu_memory = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    judge(report)
    report.seconds = time.monotonic() - began
    return report


class Run:
    """One verification: both sides, their streams, the report in the making."""

    def __init__(
        self, prepared: Prepared, footprint: Footprint, progress: Callable[[Step], None] | None
    ) -> None:
        self.pair, self.spec = prepared.pair, prepared.pair.spec
        self.report, self.tokens = prepared.report, prepared.tokens
        self.hf, self.megatron, self.exact = prepared.hf, prepared.megatron, prepared.exact
        self.footprint, self.progress = footprint, progress
        self.device = prepared.tokens.device.type
        self.step = Step(0, sum(nbytes(one) for one in self.pair.hf.tensors.values()))

    def all(self) -> None:
        """Every stage in order."""
        theirs, ours = self._embedding()
        exact = theirs.float()
        start, stop = self.report.layers
        shared: dict[str, Tensor | None] = {}
        for number in range(start, stop):
            theirs, ours, exact = self._layer(number, theirs, ours, exact, shared)
        if self.report.whole:
            normed = self._head(theirs, ours, exact)
            for number in range(self.spec.num_mtp):
                normed = self._mtp(number, *normed)

    def add(self, place: PlaceReport, *prefixes: str) -> None:
        """Take a place into the report, let go of its memory, tell the progress."""
        self.report.places.append(place)
        self.footprint.release()
        self.footprint.check(place.name)
        self.step.done += sum(
            nbytes(one) for name, one in self.pair.hf.tensors.items() if name.startswith(prefixes)
        )
        if self.progress is not None:
            self.progress(self.step)

    def _embedding(self) -> tuple[Tensor, Tensor]:
        clock = Clock(device=self.device)
        with clock.of("hf"):
            theirs = self.hf.embed(self.tokens)
        with clock.of("megatron"):
            ours = self.megatron.embed(self.tokens, self.megatron.filled("embedding"))
        outcome = Outcome(Result(theirs), Result(ours), Result(ours))
        place = place_report("embedding", "", outcome, self.report.bounds, clock=clock)
        self.add(place, self.hf.names["embed"])
        return theirs, ours

    def _layer(
        self, number: int, theirs: Tensor, ours: Tensor, exact: Tensor, shared: dict[str, Tensor | None]
    ) -> Hiddens:
        """Run layer ``number``; ``shared`` holds the selections that later layers may reuse."""
        clock = Clock(device=self.device)
        own, other = self._megatron_layer(number, ours, theirs, clock)
        hf, hf_other = self._hf_layer(number, theirs, ours, shared, clock)
        outcome = Outcome(hf, own, other, hf_other)
        following = exact
        if self.exact is not None:
            outcome.exact, alone = self._exact_layer(number, theirs, exact, shared)
            following, shared["exact"] = alone.hidden, alone.selected
        shared["hf"], shared["megatron"] = hf.selected, own.selected
        kind = kind_of(self.spec, number)
        place = place_report(f"layer {number}", kind, outcome, self.report.bounds, clock=clock)
        self.add(place, f"{self.hf.names['layers']}.{number}.")
        return hf.hidden, own.hidden, following

    def _megatron_layer(
        self, number: int, ours: Tensor, theirs: Tensor, clock: Clock
    ) -> tuple[Result, Result]:
        """On its own hidden states and on the Hugging Face model's; nothing of the layer stays."""
        with clock.of("megatron"), self.megatron.layer(number) as run:
            results = run(ours, OWN), run(theirs, CROSS)
        del run
        self.footprint.release()
        return results

    def _hf_layer(
        self,
        number: int,
        theirs: Tensor,
        ours: Tensor,
        shared: dict[str, Tensor | None],
        clock: Clock,
    ) -> tuple[Result, Result]:
        """On its own hidden states and on the Megatron model's, each with its selection."""
        with clock.of("hf"), self.hf.layer(number) as run:
            results = run(theirs, shared.get("hf")), run(ours, shared.get("megatron"))
        del run
        self.footprint.release()
        return results

    def _exact_layer(
        self, number: int, theirs: Tensor, exact: Tensor, shared: dict[str, Tensor | None]
    ) -> tuple[Result, Result]:
        """The Hugging Face layer in fp32, on the other precision's hidden states and on its own."""
        if self.exact is None:
            raise ValueError("there is no fp32 side beside an fp32 run")
        with self.exact.layer(number) as run:
            results = run(theirs.float(), shared.get("hf")), run(exact, shared.get("exact"))
        del run
        self.footprint.release()
        return results

    def _head(self, theirs: Tensor, ours: Tensor, exact: Tensor) -> Hiddens:
        """Final norm, head and log-probabilities; gives the normed hidden states."""
        clock = Clock(device=self.device)
        with Heads(self.hf, self.megatron, self.exact, clock) as heads:
            normed = heads.normalise(theirs, ours, exact)
            place = heads.place(theirs, ours)
            parity, floor = heads.compare(normed)
        self.report.predictions.append(Predictions("logprobs", parity, floor))
        place.hf_seconds, place.megatron_seconds = clock.hf, clock.megatron
        self.add(place, self.hf.names["norm"], self.hf.names["head"])
        return normed

    def _mtp(self, number: int, theirs: Tensor, ours: Tensor, exact: Tensor) -> Hiddens:
        """One MTP layer and what it predicts; gives its hidden states for the next."""
        clock = Clock(device=self.device)
        seen = shifted(self.tokens, number)
        following = shifted(self.tokens, number + 1)
        own, other = self._megatron_mtp(number, seen, ours, theirs, clock)
        with clock.of("hf"):
            embedded = self.hf.embed(following)
            with self.hf.mtp(number) as run:
                outcome = Outcome(run(embedded, theirs), own, other, run(embedded, ours))
        last = exact
        if self.exact is not None:
            embedded = self.exact.embed(following)
            with self.exact.mtp(number) as run:
                outcome.exact = run(embedded, theirs.float())
                last = run(embedded, exact).hidden
        del run
        self.footprint.release()
        # The last positions have no next token; runtimes fill them differently.
        skip = number + 1
        kind = kind_of(self.spec, self.spec.num_layers)
        place = place_report(f"mtp {number}", kind, outcome, self.report.bounds, skip_last=skip, clock=clock)
        hiddens = outcome.hf.hidden, own.hidden, last
        with Heads(self.hf, self.megatron, self.exact, clock) as heads:
            parity, floor = heads.compare(hiddens, skip_last=skip)
        self.report.predictions.append(Predictions(f"MTP {number} logprobs", parity, floor))
        self.add(place, f"{self.hf.names['layers']}.{self.spec.num_layers + number}.")
        return hiddens

    def _megatron_mtp(
        self, number: int, seen: Tensor, ours: Tensor, theirs: Tensor, clock: Clock
    ) -> tuple[Result, Result]:
        with clock.of("megatron"):
            stage, embedding = self.megatron.filled("mtp", number), self.megatron.filled("embedding")
            results = tuple(
                self.megatron.run_mtp(stage, embedding, seen, hidden) for hidden in (ours, theirs)
            )
        del stage, embedding
        self.footprint.release()
        return results[0], results[1]
