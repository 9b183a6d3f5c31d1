"""The rules that keep the design straight: data-only tables, imports one way, no family in the core."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from glmconv.tables.registry import FAMILIES

draw_floors: Any = importlib.import_module("draw_floors")  # tests.support put scripts on the path

ROOT = Path(__file__).resolve().parents[2]
MAPPINGS = sorted((ROOT / "mappings").glob("*.py"))
BRIDGES = sorted((ROOT / "bridges").glob("*.py"))
CORE = sorted((ROOT / "glmconv").rglob("*.py"))

DATA = (
    ast.Module,
    ast.Expr,
    ast.Constant,
    ast.ImportFrom,
    ast.alias,
    ast.Assign,
    ast.Name,
    ast.Store,
    ast.Load,
    ast.Tuple,
    ast.Dict,
    ast.Starred,
    ast.Call,
    ast.keyword,
    ast.Attribute,
)
"""All that a table may consist of: literals, names and calls of the vocabulary."""

VOCABULARY = {
    "glmconv.tables.dims",
    "glmconv.tables.hf",
    "glmconv.basics.dtypes",
    "glmconv.tables.rules",
    "glmconv.tables.transforms",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", MAPPINGS, ids=lambda p: p.name)
def test_mappings_hold_data_only(path: Path) -> None:
    odd = [
        f"{path.name}:{getattr(node, 'lineno', '?')} {type(node).__name__}"
        for node in ast.walk(ast.parse(path.read_text()))
        if not isinstance(node, DATA)
    ]
    assert odd == []


@pytest.mark.parametrize("path", MAPPINGS, ids=lambda p: p.name)
def test_mappings_import_the_vocabulary_only(path: Path) -> None:
    allowed = VOCABULARY | {"__future__"}
    assert {name for name in imports(path) if not name.startswith("mappings.")} <= allowed


@pytest.mark.parametrize("path", BRIDGES, ids=lambda p: p.name)
def test_bridges_import_mappings_and_the_spec_only(path: Path) -> None:
    allowed = {"__future__", "collections.abc", "typing", "dataclasses"}
    allowed |= {
        "glmconv.tables.bridge",
        "glmconv.tables.config",
        "glmconv.tables.config_from_args",
        "glmconv.tables.spec",
    }
    assert {name for name in imports(path) if not name.startswith("mappings.")} <= allowed


def test_only_the_registry_knows_bridges_and_mappings() -> None:
    guilty = [
        path.name
        for path in CORE
        if any(name.split(".")[0] in ("bridges", "mappings") for name in imports(path))
    ]
    assert guilty == []


def test_the_core_names_no_family() -> None:
    words = ("glm4", "glm_moe", "qwen", "deepseek", "kimi", "llama", "mimo", "inkling")
    guilty = []
    for path in CORE:
        if path.name == "registry.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "glmconv convert" not in node.value
            ):
                # the name of a type of rope scaling, in transformers and in configs of any family
                text = "" if node.value == "llama3" else node.value.lower()
                guilty += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert guilty == []


def test_imports_run_downwards() -> None:
    assert draw_floors.upward() == []


def test_no_imports_form_a_circle() -> None:
    assert draw_floors.circle() == []


def test_every_module_has_a_floor() -> None:
    loose = {name for name in draw_floors.modules() if draw_floors.floor(name) is None}
    assert loose == {"glmconv", "glmconv.__main__"}


def test_the_drawn_floors_are_current() -> None:
    """``python scripts/draw_floors.py`` draws them anew."""
    assert draw_floors.page() == draw_floors.PAGE.read_text()


def test_the_set_of_families_is_explicit() -> None:
    assert set(FAMILIES) == {"glm_moe_dsa", "glm4_moe", "qwen3", "qwen3_moe"}


def test_the_convert_path_does_not_import_torch() -> None:
    """A plan and a move need no tensor library; importing one costs a second and 200 MB."""
    guilty = [
        str(path.relative_to(ROOT))
        for path in CORE
        if "verify" not in path.parts and any(name.split(".")[0] == "torch" for name in imports(path))
    ]
    assert guilty == []


@pytest.mark.parametrize("path", [*CORE, *BRIDGES, *MAPPINGS], ids=lambda p: p.name)
def test_modules_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 330
