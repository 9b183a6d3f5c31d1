"""From figures to a verdict.

In fp32 the bounds are absolute: what two right runtimes differ by lies two orders of magnitude
below them, what a wrong mapping does lies far above (``docs/verify.md`` has the measurements). In
bf16 each figure is held against the noise floor, Hugging Face in bf16 against itself in fp32.
"""

from __future__ import annotations

from glmconv.verify.measure.compare import HiddenError, RoutingParity, SelectionParity
from glmconv.verify.measure.report import (
    FAILED,
    UNPROVEN,
    VERIFIED,
    Bounds,
    PlaceReport,
    Predictions,
    VerifyReport,
)

FP32 = Bounds(
    hidden=2e-5,
    logprob_p99=1e-4,
    argmax=0.999,
    pearson=0.999999,
    selection=1.0,
    routing=1.0,
    set_aside=0.02,
    tie=1e-4,
)
BF16 = Bounds(
    hidden=1e-3,
    logprob_p99=1e-2,
    argmax=0.9,
    pearson=0.9999,
    selection=0.95,
    routing=0.95,
    set_aside=1.0,
    tie=2e-2,
    times_floor=3.0,
)
BOUNDS = {"fp32": FP32, "bf16": BF16}


def judge(report: VerifyReport) -> None:
    """Write problems and verdict into the report."""
    for place in report.places:
        place.problems = place_problems(place, report.bounds)
    for predictions in report.predictions:
        predictions.problems = _prediction_problems(predictions, report.bounds)
    if report.problems:
        report.verdict = FAILED
        report.reason = f"parity fails at {', '.join(report.problems)}"
    elif report.index_topk and report.seq_len <= report.index_topk:
        report.verdict = UNPROVEN
        report.reason = (
            f"the token selection never was sparse: {report.index_topk} of {report.seq_len} tokens are "
            f"selected; give more than {report.index_topk} tokens (--seq-len) or lower --index-topk"
        )
    else:
        report.verdict = VERIFIED
        report.reason = _scope(report)


def _scope(report: VerifyReport) -> str:
    if report.whole:
        return "both models compute the same"
    start, stop = report.layers
    return f"layers {start} to {stop - 1} compute the same; other layers and the head did not run"


def place_problems(place: PlaceReport, bounds: Bounds) -> list[str]:
    """What is wrong with one stage, in words; empty where nothing is."""
    problems = []
    if place.routing is not None:
        problems += _routing_problems(place.routing, place.floor_routing, bounds)
    if place.selection is not None:
        problems += _selection_problems(place.selection, place.floor_selection, bounds)
    error = place.same_input
    # A layer that shares a selection sets tokens aside for another layer's choice, which is judged there.
    if not place.shares_index and error.set_aside > bounds.set_aside:
        problems.append(f"{error.set_aside:.1%} of the tokens choose another way")
    limit = _hidden_limit(place.floor, bounds)
    worst = error.p99 if bounds.times_floor else error.max
    if worst > limit:
        problems.append(f"relative error of hidden states {worst:.2g} > {limit:.2g}")
    return problems


def _hidden_limit(floor: HiddenError | None, bounds: Bounds) -> float:
    return bounds.hidden if floor is None else bounds.hidden + bounds.times_floor * floor.p99


def _lowered(bound: float, floor: float | None, bounds: Bounds) -> float:
    """An agreement that has to be reached, given the floor's."""
    return bound if floor is None else bound - bounds.times_floor * (1.0 - floor)


def _selection_problems(found: SelectionParity, floor: SelectionParity | None, bounds: Bounds) -> list[str]:
    problems = []
    limit = _lowered(bounds.pearson, floor.pearson if floor else None, bounds)
    if found.pearson is None or not found.pearson >= limit:
        problems.append(f"indexer scores correlate by {found.pearson} < {limit:.7g}")
    limit = _lowered(bounds.selection, floor.with_ties if floor else None, bounds)
    if not found.with_ties >= limit:
        problems.append(f"{1 - found.with_ties:.2%} of the selected tokens are others, ties aside")
    return problems


def _routing_problems(found: RoutingParity, floor: RoutingParity | None, bounds: Bounds) -> list[str]:
    problems = []
    if found.bias_difference:
        problems.append(f"router biases differ by up to {found.bias_difference:.2g}")
    limit = _lowered(bounds.routing, floor.with_ties if floor else None, bounds)
    if not found.with_ties >= limit:
        problems.append(f"{1 - found.with_ties:.2%} of the routed experts are others, ties aside")
    return problems


def _prediction_problems(predictions: Predictions, bounds: Bounds) -> list[str]:
    found, floor = predictions.parity, predictions.floor
    problems = []
    limit = bounds.logprob_p99 + (bounds.times_floor * floor.p99_abs if floor else 0.0)
    if not found.p99_abs <= limit:
        problems.append(f"p99 of |Δ logprob| {found.p99_abs:.2g} > {limit:.2g}")
    limit = _lowered(bounds.argmax, floor.argmax_agreement if floor else None, bounds)
    if not found.argmax_agreement >= limit:
        problems.append(f"argmax agrees at {found.argmax_agreement:.2%} < {limit:.2%}")
    return problems
