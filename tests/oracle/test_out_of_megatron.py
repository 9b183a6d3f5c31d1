"""Checkpoints that megatron-core itself saved export to the tensors that filled the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glmconv.commands.convert import convert
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from tests.support import convert_jobs, mcore_run
from tests.support.checkpoints import load_tensors
from tests.support.conversions import differing_tensors
from tests.support.truth import load_hf, truth_of

pytestmark = pytest.mark.slow

MODELS = {
    "0.16.1": ("glm-5", "glm-4.5", "qwen3", "qwen3-moe"),
    "0.19.2": ("glm-5", "glm-5.2", "glm-4.5", "qwen3", "qwen3-moe"),
}
FORMS = ("plain", "singleton", "optimizer-False", "optimizer-True", "padded")
PARALLEL = {
    (2, 1, 1): ("glm-5", "glm-5.2", "glm-4.5", "qwen3"),
    (1, 2, 1): ("glm-5.2", "qwen3"),
    (1, 1, 2): ("glm-5", "glm-4.5", "qwen3-moe"),
}
CASES = [(lane, model, form) for lane, models in MODELS.items() for model in models for form in FORMS]
CASES += [
    (lane, model, "tp{}pp{}ep{}".format(*layout))
    for lane in MODELS
    for layout, models in PARALLEL.items()
    for model in models
    if model in MODELS[lane]
]


class Saved:
    """Checkpoints of each lane, saved once."""

    def __init__(self, directory: Path, checkpoint: Callable[..., Path]) -> None:
        self.directory, self.checkpoint = directory, checkpoint

    def hf(self, model: str) -> Path:
        return self.checkpoint(model, dtype="float32")

    def of(self, lane: str) -> Path:
        out = self.directory / lane
        if out.exists():
            return out
        for model in MODELS[lane]:
            case = self.directory / f"{model}.pt"
            if not case.exists():
                convert_jobs.write_case(self.hf(model), case)
        cases = str(self.directory)
        arguments = {"cases": cases, "models": list(MODELS[lane]), "out": str(out)}
        mcore_run.run(convert_jobs.save_as_trainers_do, lane=lane, arguments=arguments)
        for layout, models in PARALLEL.items():
            some = [model for model in models if model in MODELS[lane]]
            parallel: dict[str, Any] = {
                "cases": cases,
                "models": some,
                "first": str(out),
                "out": str(out),
                "parallel": list(layout),
            }
            world = layout[0] * layout[1] * layout[2]
            mcore_run.run(convert_jobs.resave, lane=lane, world=world, arguments=parallel)
        return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Saved:
    return Saved(tmp_path_factory.mktemp("out"), checkpoint)


@pytest.mark.parametrize(("lane", "model", "form"), CASES)
def test_export_equals_what_filled_the_model(
    saved: Saved, tmp_path: Path, lane: str, model: str, form: str
) -> None:
    hf = saved.hf(model)
    unit = saved.of(lane) / model / form
    report = convert(
        unit, tmp_path / "hf", source=SourceOptions(origin_hf_dir=hf), target=TargetOptions(to="hf")
    )
    assert differing_tensors(load_tensors(report.path), load_tensors(hf)) == []
    reasons = " ".join(reason for _, reason, _ in report.dropped)
    assert ("trainer's state" in reasons) == form.startswith("optimizer")
    assert ("padding rows" in reasons) == (form == "padded")


@pytest.mark.parametrize("model", MODELS["0.19.2"])
def test_transformers_loads_the_export_and_computes_the_same(
    saved: Saved, tmp_path: Path, model: str
) -> None:
    hf = saved.hf(model)
    unit = saved.of("0.19.2") / model / "plain"
    out = convert(
        unit, tmp_path / "hf", source=SourceOptions(origin_hf_dir=hf), target=TargetOptions(to="hf")
    ).path
    loaded, report = load_hf(out)
    layers = loaded.config.num_hidden_layers
    assert set(report["missing_keys"]) == set()
    assert [k for k in report["unexpected_keys"] if not k.startswith(f"model.layers.{layers}.")] == []
    truth = truth_of(hf)
    logprobs = loaded(input_ids=truth.tokens, use_cache=False).logits.float().log_softmax(-1)
    assert torch.equal(logprobs, truth.logprobs) or (logprobs - truth.logprobs).abs().max() < 1e-6
