"""Move checkpoints between Hugging Face safetensors and Megatron torch_dist, and prove it.

The Python API is the command line's straight line::

    report = glmconv.convert(Path("GLM-5.2"), Path("megatron"), target=glmconv.TargetOptions())

Everything raises :class:`glmconv.errors.GlmconvError`. Names are imported on first use, so that
``import glmconv`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glmconv.checks import CheckOptions as CheckOptions
    from glmconv.checks import check as check
    from glmconv.comparison import DiffOptions as DiffOptions
    from glmconv.comparison import diff as diff
    from glmconv.conversion import RunOptions as RunOptions
    from glmconv.conversion import convert as convert
    from glmconv.conversion import plan_conversion as plan_conversion
    from glmconv.errors import GlmconvError as GlmconvError
    from glmconv.inspection import inspect as inspect
    from glmconv.opening import open_source as open_source
    from glmconv.planner import TargetOptions as TargetOptions
    from glmconv.report import Report as Report
    from glmconv.sources import SourceOptions as SourceOptions

__version__ = "0.1.0"

_HOMES = {
    "CheckOptions": "glmconv.checks",
    "DiffOptions": "glmconv.comparison",
    "GlmconvError": "glmconv.errors",
    "Report": "glmconv.report",
    "RunOptions": "glmconv.conversion",
    "SourceOptions": "glmconv.sources",
    "TargetOptions": "glmconv.planner",
    "check": "glmconv.checks",
    "convert": "glmconv.conversion",
    "diff": "glmconv.comparison",
    "inspect": "glmconv.inspection",
    "open_source": "glmconv.opening",
    "plan_conversion": "glmconv.conversion",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'glmconv' has no attribute {name!r}")
