"""Names, shapes and dtypes at full real size equal lists made without our tables."""

from __future__ import annotations

import pytest

from glmconv.basics.dtypes import DType
from glmconv.tables.expand import Layout, expand_tied, hf_layout, megatron_layout
from glmconv.tables.registry import get_bridge
from glmconv.tables.rules import DIALECTS
from glmconv.tables.spec import ModelSpec
from tests.support.checkpoints import FULL_MODELS, real_config
from tests.support.golden import load_golden

QUICK = ("glm-5.2", "qwen3-0.6b")
MODELS = [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in FULL_MODELS]
"""The big ones take a second each; two of them stay among the unit tests."""


def spec_of(model: str) -> ModelSpec:
    config = real_config(model)
    return get_bridge(config["model_type"]).spec(config, {})


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {part.stored: (*layout.axes[part.stored], *part.shape) for part in layout.parts}


@pytest.mark.parametrize("model", MODELS)
def test_hub_names_and_shapes(model: str) -> None:
    spec = spec_of(model)
    layout = hf_layout(get_bridge(spec.model_type).table, spec)
    tied = expand_tied(get_bridge(spec.model_type).table, spec)
    golden = {name: shape for name, (shape, _) in load_golden(model).items()}
    duplicates = {name: shape for name, shape in golden.items() if name in tied}
    assert shapes(layout) == {name: shape for name, shape in golden.items() if name not in tied}
    assert all(golden[tied[name]] == shape for name, shape in duplicates.items())
    assert bool(duplicates) == model.startswith("glm-4.5")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", MODELS)
def test_megatron_keys_and_shapes(model: str, dialect: str) -> None:
    spec = spec_of(model)
    layout = megatron_layout(get_bridge(spec.model_type).table, spec, dialect)
    golden = load_golden(f"{model}.{dialect}")
    assert shapes(layout) == {name: shape for name, (shape, _) in golden.items()}


@pytest.mark.parametrize("model", MODELS)
def test_only_the_router_bias_is_locked_and_golden_keeps_it_in_fp32(model: str) -> None:
    spec = spec_of(model)
    layout = hf_layout(get_bridge(spec.model_type).table, spec)
    golden = load_golden(model)
    locked = {tensor.name for tensor in layout.tensors() if tensor.lock is DType.F32}
    assert locked == {name for name in golden if name.endswith("e_score_correction_bias")}
    assert all(golden[name][1] == "F32" for name in locked)


def test_the_big_one_has_the_released_number_of_tensors() -> None:
    spec = spec_of("glm-5.2")
    layout = hf_layout(get_bridge(spec.model_type).table, spec)
    assert sum(1 for _ in layout.tensors()) == 59_585
