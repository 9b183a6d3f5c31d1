"""What the trainer of a torch_dist wrote beside the tensors about its model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.common import COMMON_FILE, read_common
from glmconv.formats.torchdist.entries import Metadata
from glmconv.source.torchdist.run_config import FILE as RUN_CONFIG
from glmconv.source.torchdist.run_config import read_run_config
from glmconv.tables.trainer_fields import Fields


def read_statements(unit: Path, metadata: Metadata) -> list[Fields]:
    """``args`` of the common state and ``run_config.yaml``, each where it is there and can be read.

    A file that is missing or cannot be read says nothing; ``check`` reports it.
    """
    found = []
    try:
        args = read_common(unit, metadata).get("args")
    except (DataError, StorageError):
        args = None
    if isinstance(args, Namespace):
        inside = COMMON_FILE if (unit / COMMON_FILE).is_file() else "common_state"
        found.append(Fields(vars(args), f"{unit / inside}: args"))
    path = unit / RUN_CONFIG
    try:
        model = read_run_config(path) if path.is_file() else {}
    except StorageError:
        model = {}
    if model:
        found.append(Fields(model, f"{path}: model"))
    return found
