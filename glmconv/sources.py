"""Open a checkpoint of either kind and say where every Hugging Face tensor lies in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from glmconv.bridge import Bridge
from glmconv.config import DTYPE_FIELDS
from glmconv.dtypes import BY_TORCH_NAME, DType
from glmconv.errors import DataError, Defect, UsageError
from glmconv.evidence import Compared, compare, findings
from glmconv.evidence_fields import Fields
from glmconv.hf.origin import Origin
from glmconv.hf.reader import HfCheckpoint, open_hf
from glmconv.layout import Layout, expand_drops, expand_tied, hf_layout
from glmconv.plan import Dropped, Equal, SourceFile
from glmconv.registry import get_bridge
from glmconv.rules import Table
from glmconv.spec import ModelSpec
from glmconv.stored import Found, Located, StoredTensor, locate

MAX_LISTED = 8
QUANTISATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a checkpoint is to be understood; the defaults are strict.

    ``allow_missing`` are exact Hugging Face names. ``fill_missing_from`` is an HF checkpoint.
    ``origin_hf_dir`` holds config (and headers) for a torch_dist that carries none;
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


@dataclass(slots=True)
class Source:
    """A checkpoint, understood. ``tensors`` are found; ``missing`` are allowed to be.

    ``statements``: what its trainer wrote down about the model; ``evidence``: that beside the config.
    """

    path: Path
    kind: str
    bridge: Bridge
    spec: ModelSpec
    config: dict[str, Any]
    layout: str
    files: list[SourceFile]
    tensors: dict[str, Located] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    equal: list[Equal] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    warnings: list[Defect] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    hf_dir: Path | None = None
    origin: Origin | None = None
    stacked: bool = False
    widened: dict[str, DType] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)
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
            hint=_advice(kinds),
        )


def _interleaved(defects: Iterable[Defect]) -> list[Defect]:
    """The first of every kind, then the second …: a long message is cut, and no kind may be lost."""
    seen: Counter[str] = Counter()
    ranked = []
    for defect in defects:
        ranked.append((seen[defect.kind], defect))
        seen[defect.kind] += 1
    return [defect for _, defect in sorted(ranked, key=lambda one: one[0])]


def _advice(kinds: Iterable[str]) -> str:
    if "missing" in kinds:
        return (
            "--fill-missing-from HF_DIR takes missing tensors from another checkpoint, --drop-mtp goes "
            "without MTP layers, --allow-missing NAME accepts one tensor's absence"
        )
    return "glmconv check shows the checkpoint tensor by tensor"


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


def refuse_quantised(config: Mapping[str, Any], stored: Mapping[str, StoredTensor], where: Path) -> None:
    """Refuse sources in a quantised form before any work, by the format's name. Raises DataError."""
    block = next((config[f] for f in QUANTISATION_FIELDS if config.get(f) is not None), None)
    if block is not None:
        told = block if isinstance(block, dict) else {"quant_method": block}
        method = told.get("quant_method", "unnamed")
        form = told.get("fmt") or told.get("format") or ""
        raise DataError(
            f"the checkpoint is quantised ({' '.join(f'{method} {form}'.split())})",
            where=str(where / "config.json"),
            hint="use the BF16 release; quantised sources are not handled yet",
        )
    odd = [t.name for t in stored.values() if not t.dtype.is_plain_float]
    scales = [name for name in stored if name.endswith(("_scale_inv", "_scale", ".scale", "weight_packed"))]
    if odd or scales:
        names = ", ".join((odd + scales)[:MAX_LISTED])
        raise DataError(
            f"{len(odd) + len(scales)} tensors are quantised or not floating point: {names}",
            where=str(where),
            hint="use the BF16 release; quantised sources are not handled yet",
        )


def open_hf_source(path: Path, options: SourceOptions) -> Source:
    """Open an HF checkpoint in hub names, with stacked experts, or mixed.

    Raises StorageError and DataError; what is missing or unexpected is listed in ``defects``.
    """
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
    _explain_unused(source, found)
    settle(source, found, options)
    return source


def _hf_name(hub: Layout, stacked: Layout, checkpoint: HfCheckpoint) -> str:
    own = {part.stored for part in stacked.parts} - {part.stored for part in hub.parts}
    return "hf-stacked" if any(name in checkpoint.stored for name in own) else "hf"


def _explain_unused(source: Source, found: Found) -> None:
    """Sort unused tensors of an HF checkpoint into duplicates, drops and surprises."""
    explain_layers(source, found.unused)
    drops, tied = expand_drops(source.table, source.spec), expand_tied(source.table, source.spec)
    for name, tensor in found.unused.items():
        if name in tied:
            _duplicate(source, tensor, tied[name])
        elif name in drops:
            source.dropped.append(Dropped(name, drops[name].reason, tensor.nbytes))
            if drops[name].warn:
                source.warnings.append(Defect("unused", drops[name].reason, name, severity="warning"))
        else:
            source.defects.append(
                Defect("unexpected", f"{tensor.dtype.label}{list(tensor.shape)} belongs to no rule", name)
            )


def explain_layers(source: Source, unused: Iterable[str]) -> None:
    """Say it in one line where the files hold more layers than the config promises."""
    spec, table, field = source.spec, source.table, source.bridge.mtp_field
    hf = source.kind == "hf"
    axes = [(table.layer.hf if hf else table.layer.mcore, spec.num_layers + (spec.num_mtp if hf else 0))]
    axes += [] if hf else [(table.mtp.mcore, spec.num_mtp)]
    for axis, promised in axes:
        head = axis.partition("{n}")[0]
        numbers = {name[len(head) :].partition(".")[0] for name in unused if name.startswith(head)}
        beyond = [
            int(n) for n in numbers if n.isascii() and n.isdigit() and len(n) < 10 and int(n) >= promised
        ]
        if beyond:
            mtp = "" if field is None else f" and {spec.num_mtp} MTP layers ({field})"
            source.defects.append(
                Defect(
                    "unexpected",
                    f"the files hold layer {max(beyond)}, config.json promises {spec.num_layers} layers{mtp}",
                    f"{head}{min(beyond)}",
                    "correct config.json if the layers belong to the model",
                )
            )


def _duplicate(source: Source, tensor: StoredTensor, to: str) -> None:
    """A duplicate is dropped, on condition that its bytes equal those of the tensor it repeats."""
    other = source.stored.get(to)
    if other is None or other.shape != tensor.shape or other.dtype is not tensor.dtype:
        source.defects.append(Defect("duplicate", f"does not have the shape and dtype of {to}", tensor.name))
        return
    left, right = tensor.chunks[0], other.chunks[0]
    source.equal.append(
        Equal(tensor.name, to, left.file, left.offset, right.file, right.offset, tensor.nbytes)
    )
    source.dropped.append(Dropped(tensor.name, f"repeats {to}", tensor.nbytes))


def settle(source: Source, found: Found, options: SourceOptions) -> None:
    """Drop MTP where asked, fill or allow what is missing, and note what stays wrong."""
    source.defects += found.defects
    source.dropped += found.padding
    _compare_statements(source, options)
    missing = {tensor.name: tensor for tensor in found.missing}
    if options.drop_mtp and source.spec.num_mtp:
        without = replace(source.spec, num_mtp=0)
        kept = {tensor.name for tensor in hf_layout(source.table, without).tensors()}
        for name in [name for name in source.tensors if name not in kept]:
            one = source.tensors.pop(name)
            size = sum(p.rows * p.cols for p in one.pieces) * one.dtype.itemsize
            source.dropped.append(Dropped(name, "MTP layer, dropped by --drop-mtp", size))
        missing = {name: tensor for name, tensor in missing.items() if name in kept}
        source.spec = without
    if options.fill_missing_from is not None and missing:
        _fill(source, missing, options.fill_missing_from)
    for name in [name for name in missing if name in options.allow_missing]:
        source.missing.add(name)
        del missing[name]
        source.warnings.append(Defect("missing", "allowed by --allow-missing", name, severity="warning"))
    if source.spec.num_mtp and any(name.endswith(".eh_proj.weight") for name in missing):
        source.defects.append(
            Defect(
                "missing",
                f"config.json promises {source.spec.num_mtp} MTP layer(s), the checkpoint lacks them",
                hint="transformers drops them when it loads and saves; use the original files, or --drop-mtp",
            )
        )
    source.defects += [Defect("missing", f"shape {list(t.shape)}", t.name) for t in missing.values()]
    _compare_dtype(source)


def _compare_statements(source: Source, options: SourceOptions) -> None:
    """What the checkpoint says about itself, beside the config."""
    source.evidence = compare(source.statements, source.spec)
    for finding in findings(source.evidence, strict=options.strict):
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


def _fill(source: Source, missing: dict[str, Any], path: Path) -> None:
    """Take missing tensors from another HF checkpoint of the same shapes."""
    other = open_hf(path)
    first = len(source.files)
    layouts = (
        hf_layout(source.table, source.spec),
        hf_layout(source.table, source.spec, stacked_experts=True),
    )
    found = locate(layouts, other.stored)
    taken = [name for name in missing if name in found.tensors]
    if taken:
        source.files += other.files
    for name in taken:
        one = found.tensors[name]
        pieces = tuple(replace(piece, file=piece.file + first) for piece in one.pieces)
        source.tensors[name] = replace(one, pieces=pieces)
        source.filled.append(name)
        source.warnings.append(Defect("filled", f"taken from {path}", name, severity="warning"))
        del missing[name]
