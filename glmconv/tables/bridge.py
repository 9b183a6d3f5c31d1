"""What a bridge provides: one family's config understood, and its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glmconv.tables.config import Shapes
from glmconv.tables.config_from_args import ArgsReader
from glmconv.tables.rules import Table
from glmconv.tables.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Bridge:
    """One family.

    ``spec(config, shapes)`` validates a raw config, cross-checked with the files' shapes where the
    source is HF, and raises DataError with all defects. ``mtp_field`` is the config's number of
    MTP layers, or None where the family has none. ``titles`` are the released models.
    ``config_of(args)`` makes a config from what a trainer wrote down, None where that cannot suffice.
    """

    model_type: str
    table: Table
    spec: Callable[[Mapping[str, Any], Shapes], ModelSpec]
    titles: tuple[str, ...]
    mtp_field: str | None = None
    config_of: Callable[[ArgsReader], dict[str, Any]] | None = None
