"""Conversions as tests make them, and torch's own reader to look at the result."""

from __future__ import annotations

import filecmp
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from glmconv.commands.conversion_report import Report
from glmconv.commands.convert import RunOptions, convert
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions

MANIFEST = "glmconv.json"


def to_megatron(src: Path, dst: Path, dialect: str = "mcore", **target: object) -> Path:
    """Convert and return the unit directory."""
    options = TargetOptions(to="megatron", dialect=dialect, **target)  # type: ignore[arg-type]
    return convert(src, dst, target=options).path


def to_hf(
    src: Path, dst: Path, *, source: SourceOptions | None = None, to: str = "hf", **target: object
) -> Path:
    """Convert and return the HF directory."""
    options = TargetOptions(to=to, **target)  # type: ignore[arg-type]
    return convert(src, dst, source=source, target=options).path


def report_of(src: Path, dst: Path, **target: object) -> Report:
    return convert(src, dst, target=TargetOptions(**target), run=RunOptions())  # type: ignore[arg-type]


def read_torch_dist(unit: Path) -> dict[str, Tensor]:
    """All tensors of a torch_dist, read by torch's own distributed checkpoint reader."""
    metadata = FileSystemReader(unit).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(unit), no_dist=True)
    return state


def files_of(root: Path) -> dict[str, Path]:
    """Relative names of all files but the manifest, which holds times."""
    return {
        str(path.relative_to(root)): path
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def assert_same_bytes(left: Path, right: Path) -> None:
    """The two directories hold the same files, byte for byte, manifests aside."""
    ours, theirs = files_of(left), files_of(right)
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not filecmp.cmp(ours[name], theirs[name], shallow=False)]
    assert differing == []


def differing_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names that are not in both, or differ in dtype, shape or any byte."""
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not same_tensor(ours[name], theirs[name])
    )


def same_tensor(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
