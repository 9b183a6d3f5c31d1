"""Checkpoints for tests: the makers of ``scripts/make_checkpoint.py``, and plain readers.

The makers live in ``scripts`` because the demo and the bench run them without the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"

if str(ROOT / "scripts") not in sys.path:
    sys.path.append(str(ROOT / "scripts"))

import wide_checkpoint  # noqa: E402
from checkpoint_configs import MODELS, raw_config  # noqa: E402
from checkpoint_headers import FULL_MODELS, glm_moe_dsa_tensors, write_layout  # noqa: E402
from golden_patterns import TensorInfo, compress, expand, expand_pattern  # noqa: E402
from make_checkpoint import make_checkpoint, make_headers_only, make_proportioned  # noqa: E402

__all__ = [
    "FULL_MODELS",
    "MODELS",
    "ROOT",
    "TensorInfo",
    "compress",
    "expand",
    "expand_pattern",
    "glm_moe_dsa_tensors",
    "load_config",
    "load_tensors",
    "make_checkpoint",
    "make_headers_only",
    "make_proportioned",
    "raw_config",
    "real_config",
    "tiny_tensors",
    "wide_checkpoint",
    "write_layout",
]


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors directory, read by the safetensors library. Raises ``ValueError``."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name in tensors:
                raise ValueError(f"{name} is in two files of {path}")
            tensors[name] = tensor
    return tensors


def load_config(path: Path) -> dict[str, Any]:
    """The raw ``config.json`` of a checkpoint directory."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def real_config(model: str) -> dict[str, Any]:
    """The raw config of a full-size model (see ``tests/data/configs/README.md``)."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{model}.json").read_text())
    return config


def tiny_tensors(model: str, *, size: str = "tiny", seed: int = 0) -> dict[str, Tensor]:
    """The tensors that ``make_checkpoint`` writes, without writing them."""
    from checkpoint_models import random_tensors

    tensors: dict[str, Tensor] = random_tensors(raw_config(model, size), seed)
    return tensors
