"""Open whatever lies at a path."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from glmconv.basics.errors import StorageError, UsageError
from glmconv.source.safetensors import open_hf_source
from glmconv.source.source import Source, SourceOptions
from glmconv.source.torchdist.location import detect_layout
from glmconv.source.torchdist.open import open_megatron_source


def open_source(path: Path, options: SourceOptions | None = None) -> Source:
    """Open an HF directory or a torch_dist root or unit.

    Raises StorageError and DataError for what cannot be understood; missing or unexpected tensors
    are listed in the source's ``defects``.
    """
    options = options or SourceOptions()
    if kind_of(path) == "megatron":
        return open_megatron_source(path, options)
    return open_hf_source(path, options)


def kind_of(path: Path) -> Literal["hf", "megatron"]:
    """Which kind of checkpoint lies at a path. Raises UsageError, StorageError or DataError."""
    local_path(path)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StorageError(f"cannot open it: {reason}", where=str(path), hint="check the path") from error
    return detect_layout(path)


def local_path(path: Path) -> None:
    """Refuse hub addresses clearly. Raises UsageError."""
    text = str(path)
    if text.startswith(("hf:/", "http:/", "https:/", "s3:/", "gs:/", "file:/")):
        raise UsageError(
            f"{text} is not a path on this machine",
            hint="download it first, for instance with `hf download REPO --local-dir DIR`",
        )
