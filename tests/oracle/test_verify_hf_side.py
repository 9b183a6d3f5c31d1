"""The Hugging Face side, run layer by layer, is the whole transformers model: masks, ropes, activation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from glmconv.source.open import open_source
from glmconv.verify.hf.side import HfSide
from glmconv.verify.mcore.forward import hf_logprobs
from tests.support.checkpoints import MODELS
from tests.support.plain import edit_json

Make = Callable[..., Path]
LENGTH = 40
"""Longer than the windows, selections and original lengths below."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT_YARN = YARN | {"rope_theta": 10000, "mscale": 1.0, "mscale_all_dim": 0.5}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "window, untied": (
        "qwen3-untied",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "window by layer": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED}),
    "window with experts": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}),
    "yarn": ("qwen3", {"rope_scaling": YARN}),
    "yarn with experts": ("qwen3-moe", {"rope_scaling": YARN}),
    "yarn of a share": ("glm-4.5", {"rope_scaling": YARN}),
    "latent yarn": ("glm-5", {"rope_parameters": LATENT_YARN}),
    "latent yarn, shared indexes": ("glm-5.2", {"rope_parameters": LATENT_YARN}),
    "linear": ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}),
    "another share": ("glm-4.5", {"partial_rotary_factor": 0.3}),
    "another activation": ("glm-4.5-air", {"hidden_act": "gelu"}),
}


def configured(made: Path, out: Path, changes: dict[str, Any]) -> Path:
    """A copy of the checkpoint with ``changes`` in its config."""
    shutil.copytree(made, out)
    edit_json(out / "config.json", lambda config: config.update(changes))
    return out


def logprobs(path: Path, tokens: Tensor, precision: str = "fp32") -> Tensor:
    """Of the layer-by-layer side: ``[batch, seq, vocab]``."""
    side = HfSide(open_source(path), precision=precision, index_topk=None, device="cpu")
    hidden, selected = side.embed(tokens), None
    for number in range(side.spec.num_layers):
        with side.layer(number) as run:
            result = run(hidden, selected)
        hidden, selected = result.hidden, result.selected
    with side.head() as (normalise, logits):
        return logits(normalise(hidden)).log_softmax(-1)


def whole(path: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of transformers' own model, loaded and run by transformers alone."""
    auto: Any = transformers.AutoModelForCausalLM
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return hf_logprobs(auto.from_pretrained(path, dtype=dtype, **eager), tokens)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 384, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model", MODELS)
def test_each_model_runs_as_transformers_runs_it(model: str, checkpoint: Make, tokens: Tensor) -> None:
    path = checkpoint(model)
    assert (logprobs(path, tokens) - whole(path, tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("model", ["glm-5.2", "qwen3-moe"])
def test_in_bf16_too(model: str, checkpoint: Make, tokens: Tensor) -> None:
    path = checkpoint(model)
    ours = logprobs(path, tokens, "bf16")
    assert (ours - whole(path, tokens, torch.bfloat16)).abs().max() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_does_each_variant_of_a_config(
    variant: str, checkpoint: Make, tokens: Tensor, tmp_path: Path
) -> None:
    """And each differs from the model as released, so that what is varied is seen at all."""
    model, changes = VARIANTS[variant]
    path = configured(checkpoint(model), tmp_path / "hf", changes)
    theirs = whole(path, tokens)
    assert (logprobs(path, tokens) - theirs).abs().max() < 1e-5
    assert (logprobs(checkpoint(model), tokens) - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("model", MODELS)
def test_what_transformers_writes_of_a_config_gives_no_remark(
    model: str, checkpoint: Make, tmp_path: Path
) -> None:
    """Every default that transformers fills in is known here, and says the same."""
    config = transformers.AutoConfig.from_pretrained(checkpoint(model))
    spec = open_source(checkpoint(model)).spec
    for whole_dump in (False, True):
        path = configured(checkpoint(model), tmp_path / str(whole_dump), {})
        (path / "config.json").write_text(config.to_json_string(use_diff=not whole_dump))
        saved = open_source(path).spec
        assert saved.remarks == ()
        assert (saved.rope, saved.moe) == (spec.rope, spec.moe)
        assert saved.dsa is None or (spec.dsa is not None and saved.dsa.full == spec.dsa.full)
