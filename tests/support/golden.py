"""The golden lists in ``tests/data/golden``: what real checkpoints hold, by name, shape and dtype."""

from __future__ import annotations

import json
from typing import Any

from .checkpoints import ROOT, TensorInfo, compress, expand, expand_pattern

__all__ = ["GOLDEN", "TensorInfo", "compress", "expand", "expand_pattern", "golden_file", "load_golden"]

GOLDEN = ROOT / "tests" / "data" / "golden"


def golden_file(name: str) -> dict[str, Any]:
    """One golden file as it is, with its notes: ``glm-5.2``, or ``glm-5.2.mcore`` for a dialect."""
    path = GOLDEN / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def load_golden(name: str, *, optional: bool = False) -> dict[str, TensorInfo]:
    """Every tensor of a golden list: name to (shape, safetensors dtype name).

    ``optional`` adds what a release stores but transformers does not (a tied head).
    """
    content = golden_file(name)
    tensors = expand(content["tensors"])
    if optional:
        tensors.update(expand(content.get("optional", {})))
    return tensors
