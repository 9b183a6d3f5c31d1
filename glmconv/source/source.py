"""Open a checkpoint of either kind and say where every Hugging Face tensor lies in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.formats.safetensors.checkpoint import HfCheckpoint, open_hf
from glmconv.formats.safetensors.origin import Origin
from glmconv.formats.stored import StoredTensor
from glmconv.source.conditions import Blank, Dropped, Equal
from glmconv.source.evidence import Compared, compare, findings
from glmconv.source.locate import Found, Located, locate
from glmconv.source.quantised import refuse_quantised
from glmconv.source.same_model import differences
from glmconv.source.surplus import BY_DROP_MTP, drop_surplus_mtp, explain_unused
from glmconv.storage.objects import StorageObject
from glmconv.tables.bridge import Bridge
from glmconv.tables.config import DTYPE_FIELDS
from glmconv.tables.expand import HfTensor, Layout, hf_layout
from glmconv.tables.registry import get_bridge
from glmconv.tables.rules import DIALECTS, UNTIED, Table
from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import Fields

UNTIED_HINT = (
    "config.json says that the head is no copy of the embedding; if the model is tied, correct its "
    '"tie_word_embeddings" (for a torch_dist in a copy that --origin-hf-dir names)'
)
MTP_ADVICE = (
    "--drop-mtp goes without MTP layers; --fill-missing-from HF_DIR takes them from another checkpoint of "
    "the same model"
)
MISSING_ADVICE = (
    "find the files that hold what is missing; --allow-missing NAME accepts one tensor's absence, which "
    "leaves the result without it"
)


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


def open_hf_source(path: Path, options: SourceOptions) -> Source:
    """Open an HF checkpoint in hub names, with stacked experts, or mixed.

    Raises StorageError and DataError; what is missing or unexpected is listed in ``defects``.
    """
    options.check()
    if options.dialect is not None:
        raise UsageError(
            f"the source is said to be in the dialect {options.dialect}, but it is a Hugging Face "
            "checkpoint, which has none",
            where=str(path),
            hint="leave the option away",
        )
    checkpoint = open_hf(path)
    bridge = family_of(checkpoint.config, options.model_type, path)
    refuse_quantised(checkpoint.config, checkpoint.stored, path)
    spec = bridge.spec(checkpoint.config, {name: one.shape for name, one in checkpoint.stored.items()})
    hub, stacked = hf_layout(bridge.table, spec), hf_layout(bridge.table, spec, stacked_experts=True)
    found = locate((hub, stacked), checkpoint.stored)
    source = Source(
        path,
        "hf",
        bridge,
        spec,
        checkpoint.config,
        _hf_name(hub, stacked, checkpoint),
        checkpoint.files,
        tensors=found.tensors,
        stored=checkpoint.stored,
        hf_dir=path,
        origin=Origin.of(checkpoint),
    )
    source.warnings += spec.remarks
    if options.drop_mtp:
        drop_surplus_mtp(source, found)
    explain_unused(source, found)
    settle(source, found, options)
    return source


def _hf_name(hub: Layout, stacked: Layout, checkpoint: HfCheckpoint) -> str:
    own = {part.stored for part in stacked.parts} - {part.stored for part in hub.parts}
    return "hf-stacked" if any(name in checkpoint.stored for name in own) else "hf"


def settle(source: Source, found: Found, options: SourceOptions) -> None:
    """Drop MTP where asked, fill or allow what is missing, and note what stays wrong."""
    source.defects += found.defects
    source.dropped += found.padding
    source.blank += found.blank
    _compare_statements(source, options)
    missing = {tensor.name: tensor for tensor in found.missing}
    without = {one.name for one in hf_layout(source.table, replace(source.spec, num_mtp=0)).tensors()}
    if options.drop_mtp:
        missing = _drop_mtp(source, missing, without)
    if options.fill_missing_from is not None:
        _fill(source, missing, options.fill_missing_from)
    for name in options.allow_missing:
        if name in missing:
            source.missing.add(name)
            del missing[name]
            what = "allowed by --allow-missing"
        elif name in source.tensors:
            what = "not missing, so --allow-missing does nothing"
        else:
            what = "no tensor of this model, so --allow-missing does nothing"
        source.warnings.append(Defect("missing", what, name, severity="warning"))
    if source.spec.num_mtp and any(name.endswith(".eh_proj.weight") for name in missing):
        source.defects.append(
            Defect(
                "missing",
                f"config.json promises {source.spec.num_mtp} MTP layer(s), the checkpoint lacks them",
                hint="transformers drops them when it loads and saves; use the original files, or --drop-mtp",
            )
        )
    heads = _head_tensors(source.table)
    source.defects += [
        Defect("missing", f"shape {list(tensor.shape)}", tensor.name, UNTIED_HINT if name in heads else "")
        for name, tensor in missing.items()
    ]
    if missing:
        source.advice = MTP_ADVICE if without.isdisjoint(missing) else MISSING_ADVICE
    _compare_dtype(source)


def _compare_statements(source: Source, options: SourceOptions) -> None:
    """What the checkpoint says about itself, beside the config."""
    source.evidence = compare(source.statements, source.spec)
    if options.drop_mtp:  # the layers go whoever promises them
        source.evidence = [one for one in source.evidence if one.field != source.bridge.mtp_field]
    for finding in findings(source.evidence, strict=options.strict or source.config_from_args):
        (source.defects if finding.severity == "error" else source.warnings).append(finding)


def _compare_dtype(source: Source) -> None:
    """Say it where the config names another dtype than the weights have: what loads by it casts them."""
    held = source.bulk_dtype
    blocks = [block for block in (source.config, source.config.get("text_config")) if isinstance(block, dict)]
    said = {
        name: str(block[name]) for block in blocks for name in DTYPE_FIELDS if block.get(name) is not None
    }
    for name, value in said.items():
        if value.removeprefix("torch.") != held.torch_name:
            what = f"says {value}, most of the weights are {held.label}"
            hint = f"a config.json that is written says {held.torch_name}; --dtype {value} casts the weights"
            source.warnings.append(Defect("dtype", what, f"config.json: {name}", hint, "warning"))


def _head_tensors(table: Table) -> set[str]:
    """Names of the tensors that a tied model has not."""
    return {hf.name for rule in table.rules if UNTIED in rule.when for hf in rule.via.slots().values()}


def _drop_mtp(source: Source, missing: dict[str, HfTensor], kept: set[str]) -> dict[str, HfTensor]:
    """Leave the MTP layers out; returns what is missing of the rest."""
    if not source.spec.num_mtp and not any(one.reason == BY_DROP_MTP for one in source.dropped):
        what = "--drop-mtp does nothing: neither the config nor the files have MTP layers"
        source.warnings.append(Defect("option", what, severity="warning"))
    for name in [name for name in source.tensors if name not in kept]:
        one = source.tensors.pop(name)
        size = sum(p.rows * p.cols for p in one.pieces) * one.dtype.itemsize
        source.dropped.append(Dropped(name, BY_DROP_MTP, size))
    source.spec = replace(source.spec, num_mtp=0)
    return {name: tensor for name, tensor in missing.items() if name in kept}


def _fill(source: Source, missing: dict[str, HfTensor], path: Path) -> None:
    """Take missing tensors from another HF checkpoint of the same model, judged as any source is."""
    if not missing:
        what = "nothing is missing, so nothing is taken from it (--fill-missing-from)"
        source.warnings.append(Defect("option", what, str(path), severity="warning"))
        return
    other = open_hf_source(path, SourceOptions(drop_mtp=source.spec.num_mtp == 0))
    other.require_sound()
    apart = differences(source.spec, other.spec)
    if apart:
        raise DataError(
            f"is not the model of {source.path}, so no tensor is taken from it",
            where=str(path),
            hint="name a checkpoint of the very same model with --fill-missing-from",
            defects=[Defect("other-model", f"{one} (the second in {path})") for one in apart],
        )
    numbers: dict[int, int] = {}
    for name in [name for name in missing if name in other.tensors]:
        one = other.tensors[name]
        for piece in one.pieces:
            if piece.file not in numbers:
                numbers[piece.file] = len(source.files)
                source.files.append(other.files[piece.file])
        pieces = tuple(replace(piece, file=numbers[piece.file]) for piece in one.pieces)
        source.tensors[name] = replace(one, pieces=pieces)
        source.filled[name] = source.files[pieces[0].file].address
        source.warnings.append(Defect("filled", f"taken from {path}", name, severity="warning"))
        del missing[name]
