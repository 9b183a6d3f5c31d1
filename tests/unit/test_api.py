"""The Python API is what README shows, lazy and callable."""

from __future__ import annotations

import subprocess
import sys

import pytest

import glmconv


@pytest.mark.parametrize("name", [name for name in glmconv.__all__ if name != "__version__"])
def test_every_public_name_is_there_documented_and_no_module(name: str) -> None:
    value = getattr(glmconv, name)
    assert callable(value)
    assert value.__doc__


def test_importing_glmconv_imports_nothing_heavy() -> None:
    code = "import sys, glmconv; print(sorted({'torch', 'numpy', 'rich', 'typer'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'konvert'"):
        _ = glmconv.konvert
