"""What the tool leaves behind in a published unit: ``glmconv.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glmconv.dtypes import BY_LABEL, DType
from glmconv.rules import DIALECTS

FILE = "glmconv.json"
HF_DIR = "hf"
"""Directory of a torch_dist unit that holds the HF config and side files."""


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read as one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("tool") == "glmconv" else None


def read_dialect(path: Path) -> str | None:
    """Dialect that a manifest names, where it names a known one."""
    manifest = read_manifest(path)
    dialect = manifest.get("dialect") if manifest else None
    return dialect if dialect in DIALECTS else None


def read_widened(path: Path) -> dict[str, DType]:
    """Tensors that a manifest says are stored wider than their origin, with the origin's dtype."""
    manifest = read_manifest(path) or {}
    widened = manifest.get("widened")
    if not isinstance(widened, dict):
        return {}
    return {name: BY_LABEL[label] for name, label in widened.items() if label in BY_LABEL}
