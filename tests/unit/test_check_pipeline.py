"""``check --pp``: splits as Megatron makes them, and no stage that starts on a layer sharing an index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from glmconv.basics.errors import UsageError
from glmconv.checks.findings import CheckReport
from glmconv.checks.pipeline import check_pipeline, split, valid_starts
from glmconv.tables.registry import get_bridge
from glmconv.tables.spec import ModelSpec
from tests.support.checkpoints import real_config


def spec_of(model: str) -> ModelSpec:
    config = real_config(model)
    return get_bridge(config["model_type"]).spec(config, {})


def checked(spec: ModelSpec, count: int, first: int | None = None, last: int | None = None) -> CheckReport:
    report = CheckReport(Path("x"))
    check_pipeline(report, spec, count, first, last)
    return report


@pytest.mark.parametrize(
    ("layers", "count", "first", "last", "sizes"),
    [
        (8, 1, None, None, [8]),
        (8, 2, None, None, [4, 4]),
        (8, 3, None, None, []),
        (78, 4, 18, 20, [18, 20, 20, 20]),
        (78, 4, 18, None, [18, 20, 20, 20]),
        (78, 4, None, 18, [20, 20, 20, 18]),
        (78, 4, None, 19, []),
        (8, 2, 3, 5, [3, 5]),
        (8, 2, 3, 4, []),
        (8, 3, 4, 4, []),
        (8, 2, 9, None, []),
    ],
)
def test_stages(layers: int, count: int, first: int | None, last: int | None, sizes: list[int]) -> None:
    stages = split(layers, count, first, last)
    assert [stop - start for start, stop in stages] == sizes
    if stages:
        assert [start for start, _ in stages[1:]] == [stop for _, stop in stages[:-1]]


def test_stages_of_the_real_schedule_may_start_at_owners_alone() -> None:
    owners = [0, 1, *range(2, 78, 4)]
    assert valid_starts(spec_of("glm-5.2")) == owners
    assert valid_starts(spec_of("glm-5")) == list(range(78))


def test_a_stage_on_a_sharing_layer_is_an_error_that_names_its_owner() -> None:
    report = checked(spec_of("glm-5.2"), 2)
    [found] = report.findings
    assert found.severity == "error"
    assert "stage 1 starts at layer 39, which shares the index of layer 38" in found.what
    assert checked(spec_of("glm-5"), 2).ok


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_what_is_suggested_works(count: int) -> None:
    report = checked(spec_of("glm-5.2"), count)
    assert report.pipeline is not None
    words = report.pipeline.suggestion.split()
    assert words[::2] == ["--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"]
    again = checked(spec_of("glm-5.2"), count, int(words[1]), int(words[3]))
    assert again.findings == []
    assert again.pipeline is not None
    assert len(again.pipeline.stages) == count


def test_an_uneven_split_is_said() -> None:
    report = checked(spec_of("glm-5"), 4)
    [found] = report.findings
    assert (found.kind, found.severity) == ("pipeline", "warning")
    assert "78 layers do not split evenly into 4 stages" in found.what
    assert checked(spec_of("glm-5"), 4, first=17).findings[0].severity == "error"


def test_nothing_helps_where_only_the_first_layer_owns_an_index() -> None:
    spec = spec_of("glm-5.2")
    assert spec.dsa is not None
    lone = replace(spec, dsa=replace(spec.dsa, full=(True, *[False] * 77)))
    assert "no first and last stage" in checked(lone, 2).findings[0].hint


def test_more_stages_than_layers() -> None:
    with pytest.raises(UsageError, match="78 layers"):
        checked(spec_of("glm-5"), 79)
