"""Every known fault is caught, in each stage whose tensors it changes, with both megatron-cores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glmconv.verify.faults.faults import FAULTS
from tests.support import mcore_run, verify_jobs
from tests.support.conversions import to_megatron

LANES = {"0.16.1": "mcore-0.18", "0.19.2": "mcore"}
MODELS = {
    "0.16.1": ("glm-5", "glm-4.5", "qwen3"),
    "0.19.2": ("glm-5.2", "glm-4.5", "qwen3-moe", "qwen3-untied"),
}
ONE_LAYER = {
    "indexer-from-neighbour": {"glm-5": ["layer 3"], "glm-5.2": ["layer 7"]},
    "layer-from-neighbour": {"glm-5": ["layer 3"], "glm-4.5": ["layer 3"]},
    "layers-swapped": {"glm-5.2": ["layer 5", "layer 6"], "glm-5": ["layer 2", "layer 3"]},
    "final-norm-minus-one": {"glm-5": ["head"], "qwen3-moe": ["head"]},
    "embedding-rolled": {"glm-5": ["embedding"], "qwen3": ["embedding", "head"]},
    "mtp-halves-swapped": {"glm-5": ["mtp 0"], "glm-4.5": ["mtp 0"]},
    "mtp-dropped": {"glm-5.2": ["mtp 0"]},
    "gate-up-swapped": {"glm-5.2": ["layer 0", "layer 1"], "glm-5": ["layer 0"]},
}


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]
) -> dict[tuple[str, str], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("self-test")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for lane, models in MODELS.items():
        # fp32 weights, so that a router weight rounded to bf16 is a fault.
        sides = {model: checkpoint(model, dtype="float32") for model in models}
        pairs = {
            model: [str(hf), str(to_megatron(hf, directory / lane / model, LANES[lane]))]
            for model, hf in sides.items()
        }
        result = mcore_run.run(verify_jobs.self_test_all, lane=lane, arguments={"pairs": pairs})[0]
        found |= {(lane, model): result[model] for model in models}
    return found


CASES = [(lane, model) for lane, models in MODELS.items() for model in models]


@pytest.mark.parametrize(("lane", "model"), CASES)
def test_every_fault_is_caught_where_it_is(reports: dict[Any, Any], lane: str, model: str) -> None:
    report = reports[lane, model]
    assert [(one["name"], one["missed"]) for one in report["faults"] if one["missed"]] == []
    assert report["exit_code"] == 0
    assert {one["name"] for one in report["faults"]} | set(report["not_applicable"]) == {
        f.name for f in FAULTS
    }
    for one in report["faults"]:
        assert one["changed"], one["name"]
        assert sorted(one["caught"]) == sorted(one["changed"])
        expected = ONE_LAYER.get(one["name"], {}).get(model)
        assert expected is None or one["changed"] == expected, one["name"]


@pytest.mark.parametrize("lane", MODELS)
def test_every_fault_has_a_model_that_can_have_it(reports: dict[Any, Any], lane: str) -> None:
    tried = {one["name"] for (of, _), report in reports.items() if of == lane for one in report["faults"]}
    # The two latents of these models have different widths, so their norms cannot change places.
    assert {fault.name for fault in FAULTS} - tried == {"latent-norms-swapped"}


def test_a_rounded_router_bias_is_caught_though_no_token_turns(reports: dict[Any, Any]) -> None:
    fault = next(one for one in reports["0.19.2", "glm-5.2"]["faults"] if one["name"] == "router-bias-bf16")
    assert all(any("router biases differ" in line for line in lines) for lines in fault["caught"].values())
