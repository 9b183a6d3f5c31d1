"""The golden lists: full size, expandable, and made by what they claim."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.support.checkpoints import (
    FULL_MODELS,
    MODELS,
    glm_moe_dsa_tensors,
    raw_config,
    real_config,
    tiny_tensors,
)
from tests.support.golden import (
    GOLDEN,
    TensorInfo,
    compress,
    expand,
    expand_pattern,
    golden_file,
    load_golden,
)
from tests.support.reference import DIALECTS, hf_to_megatron

make_golden: Any = importlib.import_module("make_golden")  # tests.support put scripts on the path

COUNTS = {
    "glm-5": 59870,  # 57 more layers with an indexer of five tensors than GLM-5.2
    "glm-5.1": 59870,
    "glm-5.2": 59585,
    "glm-4.5": 44691,
    "glm-4.5-air": 18329,
    "qwen3-0.6b": 310,
    "qwen3-30b-a3b": 18867,
}


@pytest.mark.parametrize(("model", "count"), COUNTS.items())
def test_the_real_models_have_this_many_tensors(model: str, count: int) -> None:
    golden = golden_file(model)
    assert len(load_golden(model)) == golden["count"] == count


def test_every_full_model_has_a_list_for_each_layout() -> None:
    names = {f"{model}{layout}" for model in FULL_MODELS for layout in ("", *(f".{d}" for d in DIALECTS))}
    assert {path.stem for path in GOLDEN.glob("*.json")} == names
    assert all(golden_file(name)["count"] == len(load_golden(name)) for name in names)


def test_both_sides_hold_the_same_bytes_but_for_the_copies_of_glm_4_5() -> None:
    for model in FULL_MODELS:
        config = real_config(model)
        copies = 0
        if config["model_type"] == "glm4_moe":
            copies = 2 * 2 * config["vocab_size"] * config["hidden_size"]
        for dialect in DIALECTS:
            assert golden_file(f"{model}.{dialect}")["bytes"] == golden_file(model)["bytes"] - copies


def test_glm_5_2_written_out_from_its_config_gives_the_same_list() -> None:
    """transformers' classes and the bench's own list were written apart."""
    assert glm_moe_dsa_tensors(real_config("glm-5.2")) == load_golden("glm-5.2")


@pytest.mark.parametrize("model", MODELS)
def test_lists_are_what_transformers_saves(model: str) -> None:
    """On the small models, where saving is cheap: its own renaming of experts, name by name."""
    config = raw_config(model)
    saved = {name: (tuple(t.shape), t.dtype) for name, t in tiny_tensors(model).items()}
    listed = {name: (tuple(t.shape), t.dtype) for name, t in make_golden.hf_tensors(config).items()}
    assert listed == saved


@pytest.mark.parametrize("model", ["qwen3-0.6b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.slow)])
def test_committed_lists_are_current(model: str) -> None:
    config = real_config(model)
    tensors = make_golden.hf_tensors(config)
    assert _entry(tensors, "hf") == golden_file(model)["tensors"]
    for dialect in DIALECTS:
        moved = hf_to_megatron(tensors, config, dialect)
        assert _entry(moved, dialect) == golden_file(f"{model}.{dialect}")["tensors"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5", "glm-5.2", "glm-4.5", "glm-4.5-air"])
def test_committed_lists_of_large_models_are_current(model: str) -> None:
    config = real_config(model)
    tensors = make_golden.hf_tensors(config)
    assert _entry(tensors, "hf") == golden_file(model)["tensors"]
    assert (
        _entry(hf_to_megatron(tensors, config, "mcore"), "mcore") == golden_file(f"{model}.mcore")["tensors"]
    )


def test_the_tied_head_that_a_release_stores_is_optional() -> None:
    extra = set(load_golden("qwen3-0.6b", optional=True)) - set(load_golden("qwen3-0.6b"))
    assert extra == {"lm_head.weight"}


def test_a_pattern_stands_for_its_numbers() -> None:
    assert list(expand_pattern("a.{0-2,6}.b.{0-1}.c")) == [
        f"a.{first}.b.{second}.c" for first in (0, 1, 2, 6) for second in (0, 1)
    ]


def test_compress_is_undone_by_expand_even_where_experts_differ_by_layer() -> None:
    tensors: dict[str, TensorInfo] = {
        f"l.{i}.e.{j}.w": ((i, 2), "BF16") for i in range(3) for j in range(i + 1)
    }
    tensors |= {f"l.{i}.n": ((5,), "F32") for i in (0, 1, 4)}
    assert expand(compress(tensors)) == tensors


def test_a_name_listed_twice_is_refused() -> None:
    entry = {"shape": [1], "dtype": "F32"}
    with pytest.raises(ValueError, match=r"a\.1\.b is named twice"):
        expand({"a.{0-1}.b": entry, "a.{1}.b": entry})


def _entry(tensors: dict[str, Any], layout: str) -> Any:
    entry = make_golden.golden_entry("", layout, tensors, [])["tensors"]
    return json.loads(json.dumps(entry))
