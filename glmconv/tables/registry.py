"""The families that glmconv knows, by exact ``model_type``: the only place that imports bridges."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from glmconv.basics.errors import DataError, UsageError
from glmconv.tables.bridge import Bridge

FAMILIES = {
    "glm_moe_dsa": "bridges.glm_moe_dsa",
    "glm4_moe": "bridges.glm4_moe",
    "qwen3": "bridges.qwen3",
    "qwen3_moe": "bridges.qwen3",
}
"""``model_type`` to the module whose ``BRIDGES`` hold it."""


@cache
def _same_root() -> None:
    """``bridges`` and ``mappings`` are common names: make sure that ours are the ones found."""
    roots = {}
    for package in ("glmconv", "bridges", "mappings"):
        found = find_spec(package)
        if found is None or found.origin is None:
            raise UsageError(
                f"the package {package!r} is not installed beside glmconv", hint="reinstall glmconv"
            )
        roots[package] = Path(found.origin).resolve().parent.parent
    if len(set(roots.values())) > 1:
        places = ", ".join(f"{package} from {root}" for package, root in roots.items())
        raise UsageError(
            f"another package of the same name hides ours: {places}",
            hint="run in a virtual environment of its own, outside that directory",
        )


def get_bridge(model_type: str) -> Bridge:
    """The bridge of a family. Raises DataError naming the known families."""
    if model_type not in FAMILIES:
        near = get_close_matches(model_type, FAMILIES, 1)
        raise DataError(
            f"unknown model_type {model_type!r}",
            where="config.json",
            hint=(f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(FAMILIES)}",
        )
    _same_root()
    bridges: dict[str, Bridge] = import_module(FAMILIES[model_type]).BRIDGES
    return bridges[model_type]
