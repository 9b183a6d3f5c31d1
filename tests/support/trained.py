"""A torch_dist as a trainer leaves it: no manifest, no Hugging Face files, arguments of its own."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from glmconv.commands.convert import convert
from glmconv.formats.torchdist.common import read_common, write_common
from glmconv.formats.torchdist.metadata import read_metadata
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.plan.planner import TargetOptions


def trained(hf: Path, root: Path, **target: Any) -> Path:
    """Convert ``hf`` and take away what glmconv leaves beside the trainer's own files; the unit."""
    unit = convert(hf, root, target=TargetOptions(to="megatron", **target)).path
    shutil.rmtree(unit / "hf")
    (unit / "glmconv.json").unlink()
    return unit


def set_args(unit: Path, changes: Mapping[str, Any] | None, *, without: tuple[str, ...] = ()) -> None:
    """Change the arguments in ``common.pt``; None removes them all."""
    common = read_common(unit)
    args = {name: value for name, value in vars(common["args"]).items() if name not in without}
    common["args"] = Namespace(**args | dict(changes or {}))
    if changes is None:
        del common["args"]
    (unit / "common.pt").write_bytes(write_common(common))


def lose(unit: Path, lost: Callable[[str], bool]) -> list[str]:
    """Take tensors out of ``.metadata``, as a run has it that never had them; their names."""
    metadata = read_metadata(unit)
    kept = {name: entry for name, entry in metadata.tensors.items() if not lost(name)}
    (unit / ".metadata").write_bytes(metadata_bytes(kept, metadata.objects))
    return sorted(metadata.tensors.keys() - kept.keys())
