"""What the installation can do, without importing anything heavy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from glmconv.basics.errors import StorageError
from glmconv.basics.version import __version__
from glmconv.engine import clone_refusal
from glmconv.engine.clone import filesystem_type

PACKAGES = (
    ("xxhash", "hashes of every tensor", ""),
    ("numpy", "dtype casts, value scans", ""),
    ("torch", "verify; not needed to convert", ""),
    ("safetensors", "verify; headers are read by glmconv itself", ""),
    ("huggingface_hub", "hub addresses (later)", ""),
    ("transformers", "verify: the Hugging Face side", "pip install 'glmconv[verify]'"),
    ("megatron-core", "verify: the Megatron side", "pip install 'glmconv[verify]'"),
    ("peft", "verify of adapters (later)", "pip install 'glmconv[verify]'"),
)


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(path: Path | None = None) -> dict[str, Any]:
    """Packages with versions and what each enables, the machine, and what ``path`` offers."""
    packages = []
    for name, enables, install in PACKAGES:
        found = installed(name)
        packages.append(
            {"name": name, "version": found, "enables": enables, "install": "" if found else install}
        )
    machine = {
        "glmconv": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "mcore dialect that verify runs": _native_dialect(installed("megatron-core")),
    }
    return {"packages": packages, "machine": machine, "path": _path(path) if path else {}}


def _native_dialect(megatron: str | None) -> str:
    if megatron is None:
        return "none: megatron-core is not installed"
    major, minor = (int(part) for part in megatron.split(".")[:2])
    return "mcore" if (major, minor) >= (0, 19) else "mcore-0.18 (no index sharing)"


def _path(path: Path) -> dict[str, Any]:
    """The filesystem, its free space and whether blocks can be shared there."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    usage = shutil.disk_usage(there)
    return {
        "path": str(path),
        "filesystem": filesystem_type(there.stat().st_dev) or "not told by the kernel",
        "free": f"{usage.free / 1e9:,.1f} GB of {usage.total / 1e9:,.1f} GB",
        "cloning": _cloning(there if there.is_dir() else there.parent),
    }


def _cloning(directory: Path) -> str:
    try:
        refusal = clone_refusal(None, directory)
    except StorageError as error:
        return f"cannot be tried: {error.what}"
    return refusal or "works: a conversion shares blocks with a source on the same filesystem"
