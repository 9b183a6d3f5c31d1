"""Hidden states and token selections that run through both models, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from glmconv.verify.measure.capture import Result
from glmconv.verify.measure.compare import (
    HiddenError,
    hidden_error,
    relative_errors,
    routing_parity,
    selection_parity,
    tokens_alike,
)
from glmconv.verify.measure.report import Bounds, PlaceReport


@dataclass(slots=True)
class Outcome:
    """What both sides gave at one place.

    ``hf`` ran on the Hugging Face model's hidden states, ``hf_other`` on the Megatron model's;
    ``megatron`` on its own, ``megatron_other`` on the Hugging Face model's. ``exact`` is Hugging Face in
    fp32 on the same input as ``hf``, where the run is not in fp32.
    """

    hf: Result
    megatron: Result
    megatron_other: Result
    hf_other: Result | None = None
    exact: Result | None = None


@dataclass(slots=True)
class Clock:
    """Seconds spent on each side at one place."""

    hf: float = 0.0
    megatron: float = 0.0
    device: str = "cpu"

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Add the block's time to ``hf`` or ``megatron``."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self.device != "cpu":
                torch.cuda.synchronize()
            setattr(self, side, getattr(self, side) + time.monotonic() - began)


def judged_tokens(ours: Result, theirs: Result) -> Tensor:
    """``[batch, seq]``: tokens that chose the same keys and the same experts on both sides."""
    judged = torch.ones(theirs.hidden.shape[:2], dtype=torch.bool, device=theirs.hidden.device)
    if ours.selected is not None and theirs.selected is not None:
        judged &= tokens_alike(ours.selected, theirs.selected, causal=True, width=judged.shape[1])
    if ours.routing is not None and theirs.routing is not None:
        experts = theirs.routing.scores.shape[-1]
        judged &= tokens_alike(ours.routing.indices, theirs.routing.indices, causal=False, width=experts)
    return judged


def same_input_error(ours: Result, theirs: Result, skip_last: int = 0) -> HiddenError:
    """Errors of tokens that chose alike; the last ``skip_last`` positions count as absent."""
    judged = judged_tokens(ours, theirs)
    stop = judged.shape[1] - skip_last
    return hidden_error(relative_errors(ours.hidden[:, :stop], theirs.hidden[:, :stop]), judged[:, :stop])


def place_report(
    name: str, kind: str, outcome: Outcome, bounds: Bounds, *, skip_last: int = 0, clock: Clock | None = None
) -> PlaceReport:
    """Compare everything that both sides gave at one place."""
    hf, own, other = outcome.hf, outcome.megatron, outcome.megatron_other
    stop = hf.hidden.shape[1] - skip_last
    report = PlaceReport(
        name,
        kind,
        same_input_error(other, hf, skip_last),
        hidden_error(relative_errors(own.hidden[:, :stop], hf.hidden[:, :stop])),
        shares_index=hf.selection is None and hf.selected is not None,
        hf_seconds=clock.hf if clock else 0.0,
        megatron_seconds=clock.megatron if clock else 0.0,
    )
    tie = bounds.tie
    if outcome.hf_other is not None:
        report.same_other_input = same_input_error(own, outcome.hf_other, skip_last)
    report.routing = routing_parity(other, hf, tie)
    report.running_routing = routing_parity(own, hf, tie)
    if hf.selection is not None and other.selection is not None and own.selection is not None:
        report.selection = selection_parity(other.selection, hf.selection, tie)
        report.running_selection = selection_parity(own.selection, hf.selection, tie)
        if other.raw_selection is not None:
            report.runtime_selection = selection_parity(other.raw_selection, hf.selection, tie)
    exact = outcome.exact
    if exact is not None:
        report.floor = same_input_error(hf, exact, skip_last)
        report.floor_routing = routing_parity(hf, exact, tie)
        if exact.selection is not None and hf.selection is not None:
            report.floor_selection = selection_parity(hf.selection, exact.selection, tie)
    return report
