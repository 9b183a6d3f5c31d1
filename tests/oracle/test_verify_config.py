"""A config that says what Megatron is not told is never "verified", in both lanes; what is carried is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.test_verify_hf_side import LATENT_YARN, MIXED, YARN, configured
from tests.support import mcore_run, verify_jobs
from tests.support.conversions import to_megatron

Make = Callable[..., Path]
LANES = {"0.16.1": "mcore-0.18", "0.19.2": "mcore"}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("qwen3", WINDOW, "use_sliding_window"),
    "window by layer": ("qwen3", WINDOW | {"layer_types": MIXED}, "2 of 4 layers"),
    "window with experts": ("qwen3-moe", WINDOW, "use_sliding_window"),
    "window that is ignored": ("glm-4.5", {"use_sliding_window": True}, "use_sliding_window"),
    "yarn": ("qwen3", {"rope_scaling": YARN}, "rope_scaling"),
    "yarn with experts": ("qwen3-moe", {"rope_scaling": YARN}, "rope_scaling"),
    "yarn of a share": ("glm-4.5", {"rope_scaling": YARN}, "rope_scaling"),
    "linear": ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
    "dynamic": ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling"),
    "latent linear": (
        "glm-5",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000}},
        "rope_parameters",
    ),
    "latent yarn with another factor": (
        "glm-5",
        {"rope_parameters": LATENT_YARN | {"attention_factor": 1.5}},
        "rope_parameters.attention_factor",
    ),
    "a share": ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": ("glm-4.5", {"hidden_act": "gelu"}, "hidden_act"),
    "indexer's rope": ("glm-5", {"indexer_rope_interleave": False}, "transformers ignores it"),
    "rope": ("glm-5", {"rope_interleave": False}, "transformers ignores it"),
    "router": ("glm-4.5", {"norm_topk_prob": False}, "norm_topk_prob"),
}
CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "window that is off": ("qwen3", WINDOW | {"use_sliding_window": False}),
    "window longer than any text": ("qwen3-moe", WINDOW | {"sliding_window": 4096}),
    "another share": ("glm-4.5", {"partial_rotary_factor": 0.3}),
    "latent yarn": ("glm-5", {"rope_parameters": LATENT_YARN}),
    "latent yarn by default": ("glm-5", {"rope_parameters": YARN | {"rope_theta": 10000}}),
    "a key that nothing reads": ("qwen3", {"a_new_switch": 1}),
}
PATTERN = ["full", "full", "shared", "shared", "full", "shared", "shared", "full"]
SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "pattern of letters": ("glm-5.2", {"indexer_types": None, "index_topk_pattern": "FFSSFSSF"}),
    "pattern of words": ("glm-5.2", {"indexer_types": None, "index_topk_pattern": PATTERN}),
    "latent yarn, shared indexes": ("glm-5.2", {"rope_parameters": LATENT_YARN}),
}
"""Index sharing needs megatron-core 0.19."""


class Calls:
    """Every variant converted and verified by the command line, in one process a lane."""

    def __init__(self, folder: Path, checkpoint: Make) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, lane: str, name: str) -> dict[str, Any]:
        if lane not in self.found:
            models = {name: (model, changes) for name, (model, changes, _) in REFUSED.items()} | CARRIED
            models |= SHARING if lane == "0.19.2" else {}
            calls = [["verify", *self._pair(lane, *one), "--seq-len", "40"] for one in models.values()]
            found = mcore_run.run(verify_jobs.command_line, lane=lane, arguments={"calls": calls})[0]
            self.found[lane] = dict(zip(models, found, strict=True))
        call: dict[str, Any] = self.found[lane][name]
        return call

    def _pair(self, lane: str, model: str, changes: dict[str, Any]) -> list[str]:
        place = self.folder / lane / str(len(list(self.folder.glob("*/*"))))
        hf = configured(self.checkpoint(model), place / "hf", changes)
        return [str(hf), str(to_megatron(hf, place / "mcore", LANES[lane]))]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> Calls:
    return Calls(tmp_path_factory.mktemp("verify-config"), checkpoint)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_by_its_key(calls: Calls, lane: str, name: str) -> None:
    found = calls.of(lane, name)
    assert found["exit"] == 2, found
    assert "verified" not in found["out"]
    words = " ".join((found["out"] + found["err"]).split())
    assert REFUSED[name][2] in words


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_is_verified(calls: Calls, lane: str, name: str) -> None:
    found = calls.of(lane, name)
    assert found["exit"] == 0, found
    assert found["out"].splitlines()[-1] == "verified: both models compute the same"
    assert ("a_new_switch" in found["err"]) == (name == "a key that nothing reads")


@pytest.mark.parametrize("name", SHARING)
def test_shared_indexes_are_verified_however_they_are_listed(calls: Calls, name: str) -> None:
    assert calls.of("0.19.2", name)["exit"] == 0, calls.of("0.19.2", name)
