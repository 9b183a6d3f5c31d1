"""Move checkpoints between Hugging Face safetensors and Megatron torch_dist, and prove it.

The Python API is the command line's straight line::

    report = glmconv.convert(Path("GLM-5.2"), Path("megatron"), target=glmconv.TargetOptions())

Everything raises :class:`glmconv.basics.errors.GlmconvError`. Names are imported on first use, so that
``import glmconv`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from glmconv.basics.version import __version__

if TYPE_CHECKING:
    from glmconv.basics.errors import GlmconvError as GlmconvError
    from glmconv.checks.findings import CheckOptions as CheckOptions
    from glmconv.commands.check import check as check
    from glmconv.commands.conversion_report import Report as Report
    from glmconv.commands.convert import RunOptions as RunOptions
    from glmconv.commands.convert import convert as convert
    from glmconv.commands.convert import plan_conversion as plan_conversion
    from glmconv.commands.diff import DiffOptions as DiffOptions
    from glmconv.commands.diff import diff as diff
    from glmconv.commands.inspect import inspect as inspect
    from glmconv.plan.planner import TargetOptions as TargetOptions
    from glmconv.source.open import open_source as open_source
    from glmconv.source.source import SourceOptions as SourceOptions

_HOMES = {
    "CheckOptions": "glmconv.checks.findings",
    "DiffOptions": "glmconv.commands.diff",
    "GlmconvError": "glmconv.basics.errors",
    "Report": "glmconv.commands.conversion_report",
    "RunOptions": "glmconv.commands.convert",
    "SourceOptions": "glmconv.source.source",
    "TargetOptions": "glmconv.plan.planner",
    "check": "glmconv.commands.check",
    "convert": "glmconv.commands.convert",
    "diff": "glmconv.commands.diff",
    "inspect": "glmconv.commands.inspect",
    "open_source": "glmconv.source.open",
    "plan_conversion": "glmconv.commands.convert",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'glmconv' has no attribute {name!r}")
