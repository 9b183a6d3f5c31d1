"""Find a checkpoint: which layout a directory holds, and which iteration of a Megatron root."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.common import read_scalars

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's: a number, or ``release`` (megatron/training/checkpointing.py, read_metadata)."""

BRIDGE_TRACKER = "latest_train_state.pt"
"""Megatron-Bridge's: its ``step`` is the iteration (training/checkpointing.py, TRACKER_PREFIX)."""

METADATA = ".metadata"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")
_MAX_TRACKER = 64


@dataclass(frozen=True, slots=True)
class Located:
    """``unit_dir`` holds ``.metadata``; ``root`` is the directory of all iterations.

    ``iteration`` is None for a release or a directory that is not named after one. Where the unit
    was given itself and its name does not tell, ``root`` is the unit.
    """

    root: Path
    unit_dir: Path
    iteration: int | None


def unit_name(iteration: int | None) -> str:
    """Directory of an iteration in a root; None is the release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def locate(path: Path) -> Located:
    """The unit that ``path`` means: a root with tracker, ``iter_NNNNNNN``, ``release``, or any unit.

    Raises :class:`StorageError` where there is nothing, :class:`DataError` where what is there does
    not fit together.
    """
    if not path.is_dir():
        raise StorageError("is not a directory", where=str(path), hint="pass a checkpoint's directory")
    if (path / METADATA).is_file():
        iteration = _iteration_of(path.resolve().name)
        named = iteration is not None or path.resolve().name == RELEASE
        return Located(path.parent if named else path, path, iteration)
    iteration = _tracked(path)
    unit = path / unit_name(iteration)
    if not (unit / METADATA).is_file():
        found = ", ".join(_units(path)) or "no complete iteration"
        raise DataError(
            f"its tracker names {unit.name}, which is not a complete torch_dist checkpoint",
            where=str(path),
            hint=f"found there: {found}; pass the one you mean",
        )
    return Located(path, unit, iteration)


def detect_layout(path: Path) -> Literal["hf", "megatron"]:
    """Which layout a directory holds, told by the files in it, never by its name.

    A ``config.json`` or a tokenizer beside a Megatron checkpoint does not make it another layout.
    Raises :class:`StorageError` if it holds neither, :class:`DataError` if it holds both.
    """
    if not path.is_dir():
        raise StorageError("is not a directory", where=str(path), hint="pass a checkpoint's directory")
    megatron = any((path / name).is_file() for name in (METADATA, TRACKER, BRIDGE_TRACKER))
    shards = any(path.glob("*.safetensors"))
    if megatron and shards:
        raise DataError(
            "holds both a Megatron checkpoint and safetensors files",
            where=str(path),
            hint="move one of them away, or pass the iteration's own directory",
        )
    if megatron:
        return "megatron"
    if shards or (path / "config.json").is_file():
        return "hf"
    units = _units(path)
    raise StorageError(
        "holds neither Hugging Face files (config.json, *.safetensors) nor a Megatron torch_dist checkpoint "
        f"(.metadata, or {TRACKER})",
        where=str(path),
        hint=f"pass {path / units[0]}" if units else "pass the directory that holds them",
    )


def _iteration_of(name: str) -> int | None:
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def _units(root: Path) -> list[str]:
    """Names of the complete iterations in a root, latest last."""
    return sorted(entry.parent.name for entry in root.glob(f"*/{METADATA}"))


def _tracked(root: Path) -> int | None:
    """Iteration that the root's tracker names; None is the release."""
    tracker = root / TRACKER
    if (root / BRIDGE_TRACKER).is_file():
        # Megatron-Bridge looks at its own tracker first, and may leave an older one of Megatron-LM.
        return _bridge_tracked(root / BRIDGE_TRACKER)
    if not tracker.is_file():
        units = _units(root)
        raise StorageError(
            f"has neither {METADATA} nor {TRACKER}",
            where=str(root),
            hint=f"pass one of {', '.join(units)}" if units else "pass a torch_dist checkpoint's directory",
        )
    try:
        with tracker.open("rb") as stream:
            text = stream.read(_MAX_TRACKER).decode("ascii", "replace").strip()
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", where=str(tracker)) from error
    if text == RELEASE:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise DataError(f"holds {text!r}, neither a number nor {RELEASE!r}", where=str(tracker))
    return int(text)


def _bridge_tracked(tracker: Path) -> int:
    step = read_scalars(tracker).get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise DataError("holds no step", where=str(tracker), hint="pass the iteration's own directory")
    return step
