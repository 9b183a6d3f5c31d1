"""A checkpoint, understood: where every Hugging Face tensor lies in it, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.formats.safetensors.origin import Origin
from glmconv.formats.stored import StoredTensor
from glmconv.source.conditions import Blank, Dropped, Equal
from glmconv.source.evidence import Compared
from glmconv.source.locate import Located
from glmconv.storage.objects import StorageObject
from glmconv.tables.bridge import Bridge
from glmconv.tables.registry import get_bridge
from glmconv.tables.rules import DIALECTS, Table
from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import Fields


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a checkpoint is to be understood; the defaults are strict.

    ``allow_missing`` are exact Hugging Face names. ``fill_missing_from`` is an HF checkpoint of the
    same model. ``dialect`` is that of a torch_dist which does not tell.
    ``origin_hf_dir`` holds config (and headers) for a torch_dist that carries none.;
    ``config_from_args`` makes its config from what its trainer wrote down. ``strict``: what the
    trainer wrote down and the config contradicts is a defect also where it moves no rows.
    """

    model_type: str | None = None
    dialect: str | None = None
    origin_hf_dir: Path | None = None
    fill_missing_from: Path | None = None
    allow_missing: frozenset[str] = frozenset()
    drop_mtp: bool = False
    config_from_args: bool = False
    strict: bool = False

    def check(self) -> None:
        """Raise UsageError for what means nothing whatever the source is."""
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise UsageError(
                f"{self.dialect}: unknown dialect of a source", hint=f"one of {', '.join(DIALECTS)}"
            )


@dataclass(slots=True)
class Source:
    """A checkpoint, understood. ``tensors`` are found; ``missing`` are allowed to be.

    ``config_from``: the ``config.json`` of a torch_dist, where it is not the unit's own.
    ``filled`` are tensors from another checkpoint, each with the file it comes from. ``changes`` are
    fields of ``config`` that the checkpoint itself has corrected. ``advice``: what to try.
    ``statements``: what its trainer wrote down about the model; ``evidence``: that beside the config.
    """

    path: Path
    kind: str
    bridge: Bridge
    spec: ModelSpec
    config: dict[str, Any]
    layout: str
    files: list[StorageObject]
    tensors: dict[str, Located] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    equal: list[Equal] = field(default_factory=list)
    blank: list[Blank] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    warnings: list[Defect] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    hf_dir: Path | None = None
    origin: Origin | None = None
    stacked: bool = False
    widened: dict[str, DType] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    config_from: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    advice: str = "glmconv check shows the checkpoint tensor by tensor"
    trainer_bytes: int = 0
    statements: list[Fields] = field(default_factory=list)
    evidence: list[Compared] = field(default_factory=list)
    config_from_args: bool = False

    @property
    def table(self) -> Table:
        return self.bridge.table

    @property
    def bulk_dtype(self) -> DType:
        """The dtype that most parameters are stored in; the config's where there are none."""
        counts: Counter[DType] = Counter()
        for located in self.tensors.values():
            counts[located.dtype] += prod(located.tensor.shape)
        return counts.most_common(1)[0][0] if counts else BY_TORCH_NAME[self.spec.dtype]

    def require_sound(self) -> None:
        """Raise DataError listing every defect, where there are any."""
        if not self.defects:
            return
        kinds = sorted({defect.kind for defect in self.defects})
        raise DataError(
            f"{len(self.defects)} things are wrong ({', '.join(kinds)})",
            where=str(self.path),
            defects=_interleaved(self.defects),
            hint=self.advice,
        )


def _interleaved(defects: Iterable[Defect]) -> list[Defect]:
    """The first of every kind, then the second …: a long message is cut, and no kind may be lost."""
    seen: Counter[str] = Counter()
    ranked = []
    for defect in defects:
        ranked.append((seen[defect.kind], defect))
        seen[defect.kind] += 1
    return [defect for _, defect in sorted(ranked, key=lambda one: one[0])]


def family_of(config: Mapping[str, Any], model_type: str | None, where: Path) -> Bridge:
    """The bridge that ``config`` names; a given ``model_type`` must be the same. Raises DataError."""
    named = config.get("model_type")
    if not isinstance(named, str):
        raise DataError("has no model_type", where=str(where / "config.json"))
    if model_type is not None and model_type != named:
        raise UsageError(
            f"--model-type {model_type}, but config.json says {named!r}",
            where=str(where),
            hint="leave --model-type away, or name another checkpoint",
        )
    return get_bridge(named)


def describe_layout(source: Source) -> str:
    """``hf``, ``hf-stacked`` or ``megatron (dialect)``."""
    return f"megatron ({source.layout})" if source.kind == "megatron" else source.layout
