"""Checkpoints that many tests read; each is made once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("glm-5.2", router_bias_dtype="bfloat16")``: a small HF checkpoint; do not write to it."""
    made: dict[str, Path] = {}

    def make(model: str, **options: str) -> Path:
        key = f"{model} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(model, tmp_path_factory.mktemp("hf") / model, **options)  # type: ignore[arg-type]
        return made[key]

    return make
