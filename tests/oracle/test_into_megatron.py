"""Converted checkpoints load in the real megatron-core and compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import convert_jobs, mcore_run
from tests.support.conversions import to_megatron

pytestmark = pytest.mark.slow

MODELS = {
    "0.16.1": ("glm-5", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe"),
    "0.19.2": ("glm-5", "glm-5.2", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe"),
}
DIALECT = {"0.16.1": "mcore-0.18", "0.19.2": "mcore"}
PARALLEL = {
    (2, 1, 1): ("glm-5", "glm-5.2", "qwen3", "qwen3-untied"),
    (1, 2, 1): ("glm-5.2", "glm-4.5", "qwen3"),
    (1, 1, 2): ("glm-5", "glm-4.5-air", "qwen3-moe"),
}
NOISE = 2e-5

CASES = [(lane, model) for lane, models in MODELS.items() for model in models]
PARALLEL_CASES = [
    (lane, layout, model)
    for lane in MODELS
    for layout, models in PARALLEL.items()
    for model in models
    if model in MODELS[lane]
]


class Loads:
    """Converts once a lane, and loads once a lane and layout."""

    def __init__(self, directory: Path, checkpoint: Callable[..., Path]) -> None:
        self.directory, self.checkpoint = directory, checkpoint
        self.results: dict[Any, list[dict[str, Any]]] = {}

    def of(self, lane: str, layout: tuple[int, int, int]) -> list[dict[str, Any]]:
        if (lane, layout) in self.results:
            return self.results[lane, layout]
        models = [m for m in MODELS[lane] if layout == (1, 1, 1) or m in PARALLEL[layout]]
        units = {}
        for model in models:
            hf = self.checkpoint(model, dtype="float32")
            case = self.directory / f"{model}.pt"
            if not case.exists():
                convert_jobs.write_case(hf, case)
            root = self.directory / lane / model
            units[model] = str(root / "release" if root.exists() else to_megatron(hf, root, DIALECT[lane]))
        found = mcore_run.run(
            convert_jobs.load_converted,
            lane=lane,
            world=layout[0] * layout[1] * layout[2],
            arguments={"cases": str(self.directory), "units": units, "parallel": list(layout)},
        )
        self.results[lane, layout] = found
        return found


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Loads:
    return Loads(tmp_path_factory.mktemp("into"), checkpoint)


@pytest.mark.parametrize(("lane", "model"), CASES)
def test_one_process_loads_everything_and_agrees(loads: Loads, lane: str, model: str) -> None:
    found = loads.of(lane, (1, 1, 1))[0][model]
    assert found["missing"] == []
    assert [name for name in found["unexpected"] if "_extra_state" not in name] == []
    assert found["differing"] == []
    assert max(found["parity"].values()) <= NOISE
    assert ("mtp" in found["parity"]) == model.startswith("glm")


@pytest.mark.parametrize(("lane", "layout", "model"), PARALLEL_CASES)
def test_parallel_layouts_load_and_agree(
    loads: Loads, lane: str, layout: tuple[int, int, int], model: str
) -> None:
    ranks = [rank[model] for rank in loads.of(lane, layout)]
    assert [rank["missing"] for rank in ranks] == [[], []]
    for rank in ranks:
        assert [name for name in rank["unexpected"] if "_extra_state" not in name] == []
    differences = [value for rank in ranks for value in rank["parity"].values()]
    assert differences
    assert max(differences) <= NOISE
