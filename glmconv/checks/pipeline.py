"""Whether the layers split into pipeline stages that can run a shared index."""

from __future__ import annotations

from collections.abc import Iterator

from glmconv.basics.errors import UsageError
from glmconv.checks.findings import CheckReport, PipelineReport
from glmconv.tables.spec import ModelSpec

Stages = list[tuple[int, int]]
"""First layer and one past the last of each stage."""


def check_pipeline(
    report: CheckReport, spec: ModelSpec, count: int, first: int | None = None, last: int | None = None
) -> None:
    """Split the decoder into ``count`` stages as Megatron does and check where each one starts.

    Megatron-Core splits evenly; ``first`` and ``last`` are the layers of those stages where its
    launcher sets them. The selection of tokens never crosses a stage, so no stage may start on a
    layer that shares the index of an earlier one. MTP layers sit on the last stage and own theirs.
    """
    if count < 1 or count > spec.num_layers:
        raise UsageError(f"--pp {count}: the model has {spec.num_layers} layers")
    starts = valid_starts(spec)
    stages = split(spec.num_layers, count, first, last)
    suggestion = "" if stages and _wrong(spec, stages) is None else _suggest(spec, count)
    report.pipeline = PipelineReport(count, stages, starts, suggestion)
    if not stages:
        report.note(
            "pipeline",
            f"{spec.num_layers} layers do not split evenly into {count} stages; Megatron refuses unless "
            "told the layers of the first or last stage",
            f"--pp {count}",
            suggestion,
            "warning" if first is None and last is None else "error",
        )
        return
    wrong = _wrong(spec, stages)
    if wrong is not None:
        stage, source = wrong
        report.note(
            "pipeline",
            f"stage {stage} starts at layer {stages[stage][0]}, which shares the index of layer {source} "
            "on an earlier stage",
            f"--pp {count}",
            suggestion,
        )


def valid_starts(spec: ModelSpec) -> list[int]:
    """Layers at which a stage may start: those that share no index."""
    return [layer for layer in range(spec.num_layers) if spec.dsa is None or spec.dsa.full[layer]]


def split(layers: int, count: int, first: int | None = None, last: int | None = None) -> Stages:
    """Stages as Megatron-Core cuts them; empty where the layers do not divide."""
    if count == 1:
        return [(0, layers)]
    middle = count - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (middle and (rest % middle or not rest)) or (not middle and rest):
        return []
    each = rest // middle if middle else 0
    sizes = [each] * count
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    stages, at = [], 0
    for size in sizes:
        stages.append((at, at + size))
        at += size
    return stages


def _wrong(spec: ModelSpec, stages: Stages) -> tuple[int, int] | None:
    """The first stage that starts on a sharing layer, and the layer that owns the index."""
    if spec.dsa is None:
        return None
    for number, (start, _) in enumerate(stages):
        if not spec.dsa.full[start]:
            return number, max(layer for layer in range(start) if spec.dsa.full[layer])
    return None


def _candidates(layers: int, count: int) -> Iterator[tuple[int, int, Stages]]:
    for first in range(1, layers):
        for last in range(1, layers - first + 1):
            stages = split(layers, count, first, last)
            if stages:
                yield first, last, stages


def _suggest(spec: ModelSpec, count: int) -> str:
    """The most even split by first and last stage that runs, in the words of Megatron's launcher."""
    good = [
        (max(stop - start for start, stop in stages), abs(first - last), first, last)
        for first, last, stages in _candidates(spec.num_layers, count)
        if _wrong(spec, stages) is None
    ]
    if not good:
        return "no first and last stage make it work; use fewer stages or an explicit pipeline layout"
    _, _, first, last = min(good)
    return f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}"
