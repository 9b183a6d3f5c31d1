"""What is called verified, failed and unproven."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glmconv.verify.measure.compare import HiddenError, RoutingParity, SelectionParity
from glmconv.verify.measure.logprobs import LogprobParity
from glmconv.verify.measure.report import PlaceReport, Predictions, VerifyReport
from glmconv.verify.measure.verdict import BF16, FP32, judge
from glmconv.verify.page.html import page

SMALL = HiddenError(max=3e-7, p99=2e-7, mean=1e-7, set_aside=0.0)
SAME = SelectionParity(sparse_rows=40, pearson=1.0, overlap=1.0, with_ties=1.0, by_position=[1.0] * 32)
ROUTED = RoutingParity(agreement=1.0, with_ties=1.0, bias_difference=0.0)
CLOSE = LogprobParity(4e-6, 2e-6, 1e-6, 1e-12, 1e-12, 1.0, 48)


def place(**changes: Any) -> PlaceReport:
    fields: dict[str, Any] = {"same_input": SMALL, "running": SMALL, "selection": SAME, "routing": ROUTED}
    return PlaceReport("layer 1", "MoE, indexer", **{**fields, **changes})


def report(*places: PlaceReport, **changes: Any) -> VerifyReport:
    fields: dict[str, Any] = {
        "hf": Path("hf"),
        "megatron": Path("megatron"),
        "model_type": "model",
        "dialect": "mcore",
        "runtime_dialect": "mcore",
        "relaid": False,
        "precision": "fp32",
        "device": "cpu",
        "batch": 1,
        "seq_len": 48,
        "index_topk": 8,
        "layers": (0, 2),
        "num_layers": 2,
        "bounds": FP32,
        "places": list(places),
        "predictions": [Predictions("logprobs", CLOSE)],
        "versions": {"megatron-core": "0.19.2"},
    }
    made = VerifyReport(**{**fields, **changes})
    judge(made)
    return made


def test_noise_is_verified() -> None:
    found = report(place())
    assert (found.verdict, found.exit_code, found.problems) == ("verified", 0, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"same_input": replace(SMALL, max=1e-4)}, "hidden states"),
        ({"same_input": replace(SMALL, max=math.inf)}, "hidden states"),
        ({"same_input": replace(SMALL, set_aside=0.1)}, "choose another way"),
        ({"selection": replace(SAME, with_ties=0.999)}, "selected tokens are others"),
        ({"selection": replace(SAME, pearson=0.9999)}, "correlate by 0.9999"),
        ({"selection": replace(SAME, pearson=None)}, "correlate by None"),
        ({"routing": replace(ROUTED, with_ties=0.99)}, "routed experts are others"),
        ({"routing": replace(ROUTED, bias_difference=1e-9)}, "router biases differ"),
    ],
)
def test_each_figure_can_fail_a_layer(changes: dict[str, Any], said: str) -> None:
    found = report(place(), place(**changes))
    assert (found.verdict, found.exit_code) == ("failed", 4)
    assert "layer 1" in found.reason
    assert any(said in problem for problem in found.places[1].problems)
    assert said in page(found)


def test_an_upstream_layer_is_to_blame_for_tokens_that_a_sharing_layer_sets_aside() -> None:
    aside = replace(SMALL, set_aside=0.5)
    assert report(place(same_input=aside, selection=None, shares_index=True)).verdict == "verified"


@pytest.mark.parametrize("parity", [replace(CLOSE, p99_abs=2e-4), replace(CLOSE, argmax_agreement=0.99)])
def test_log_probabilities_can_fail(parity: LogprobParity) -> None:
    found = report(place(), predictions=[Predictions("logprobs", parity)])
    assert found.verdict == "failed"
    assert "logprobs" in found.reason


def test_one_flipped_token_does_not_fail_a_long_text() -> None:
    parity = replace(CLOSE, max_abs=3e-3)
    assert report(place(), predictions=[Predictions("logprobs", parity)]).verdict == "verified"


def test_a_dense_selection_proves_nothing_but_a_failure_stays_one() -> None:
    assert report(place(), seq_len=8).exit_code == 2
    assert report(place(same_input=replace(SMALL, max=1.0)), seq_len=8).exit_code == 4


def test_bf16_is_measured_by_its_floor() -> None:
    floor = HiddenError(max=8e-3, p99=7e-3, mean=5e-3, set_aside=0.0)
    near, far = replace(floor, p99=1.5e-2), replace(floor, p99=4e-2)
    loose: dict[str, Any] = {"floor": floor, "floor_selection": SAME, "floor_routing": ROUTED}
    assert report(place(same_input=near, **loose), bounds=BF16).verdict == "verified"
    assert report(place(same_input=far, **loose), bounds=BF16).verdict == "failed"


def test_what_is_no_number_is_null_in_json_and_a_dash_on_the_page() -> None:
    found = report(place(same_input=HiddenError(math.nan, math.nan, math.nan, 1.0), shares_index=True))
    assert found.to_json()["places"][0]["same_input"]["max"] is None
    assert "<td>–</td>" in page(found)


def test_the_page_escapes_what_it_is_told() -> None:
    found = report(place(), model_type="<b>&", warnings=["<script>alert(1)</script>"])
    assert "<script" not in page(found)
    assert "&lt;b&gt;&amp;" in page(found)
