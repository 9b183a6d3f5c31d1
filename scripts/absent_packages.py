"""Empty stand-ins for packages that sources of trainers import and a CPU machine does not have."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

ABSENT_PACKAGES = (
    *("causal_conv1d", "deep_ep", "mamba_ssm", "mbridge", "miles_megatron_plugins", "pylatexenc", "ray"),
    *("ring_flash_attn", "sglang", "sglang_router", "six", "torch_memory_saver", "transformer_engine"),
    *("triton", "wandb"),
)
"""Found after every real finder has failed, so that a package that is there is taken as it is."""


class _Members(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_Members):
    """Stands for anything of a package that is not here; as a decorator it changes nothing."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ``ABSENT_PACKAGES``, after every real finder has failed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install(roots: Iterable[str]) -> None:
    """Put source trees first on the path, and the stand-ins behind everything that is really there."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # These ask what is there (triton, sglang) when they are imported: they must see the truth.
    import transformers  # noqa: F401

    sys.path[:0] = roots
    sys.meta_path.append(_Absent())
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda function: function  # type: ignore[attr-defined]
