"""What the tool leaves behind in a published unit: ``glmconv.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import BY_LABEL, DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.basics.json_files import MAX_RECORD, read_json
from glmconv.tables.rules import DIALECTS

FILE = "glmconv.json"
HF_DIR = "hf"
"""Directory of a torch_dist unit that holds the HF config and side files."""


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read as one."""
    try:
        content = read_json(path, MAX_RECORD)
    except (DataError, StorageError):
        return None
    return content if content.get("tool") == "glmconv" else None


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
    dtypes = {name: BY_LABEL.get(label) for name, label in widened.items() if isinstance(label, str)}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None and dtype.is_plain_float}
