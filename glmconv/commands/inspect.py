"""What lies at a path: layout, model, sizes and tensors, from headers alone."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from glmconv.basics.errors import DataError
from glmconv.checks.subject import INDEXER, layers, templates
from glmconv.formats.safetensors.checkpoint import HfCheckpoint, open_hf
from glmconv.formats.stored import StoredTensor
from glmconv.formats.torchdist.common import read_common
from glmconv.plan.side_files import find_side_files, grouped
from glmconv.source.evidence import Compared
from glmconv.source.manifest import FILE, read_manifest
from glmconv.source.open import local_path, open_source
from glmconv.source.source import Source, SourceOptions, describe_layout
from glmconv.source.torchdist.location import detect_layout, locate
from glmconv.source.torchdist.open import Unit, open_unit
from glmconv.storage.objects import StorageObject
from glmconv.tables.registry import get_bridge


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor under its name in the files. ``files`` are base names, ``bytes`` its data."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    files: list[str]


@dataclass(slots=True)
class DtypeLine:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(slots=True)
class InspectReport:
    """What a path holds. ``understood`` is False where the family or its config is unknown; then
    ``why`` says so and only what the headers tell is here."""

    path: Path
    kind: str
    layout: str
    model_type: str = ""
    titles: list[str] = field(default_factory=list)
    understood: bool = False
    why: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    evidence: list[Compared] = field(default_factory=list)
    dtypes: list[DtypeLine] = field(default_factory=list)
    tensors: list[TensorLine] = field(default_factory=list)
    manifest: dict[str, Any] | None = None
    defects: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, for ``--json``."""
        return {**asdict(self), "path": str(self.path)}


def inspect(path: Path, options: SourceOptions | None = None, match: str | None = None) -> InspectReport:
    """Describe the checkpoint at ``path``; ``match`` (a glob) lists the tensors whose names fit.

    Reads headers only. Works for families that no table knows. Raises StorageError for what cannot
    be read and DataError where the headers themselves are wrong.
    """
    path, options = Path(path), options or SourceOptions()
    local_path(path)
    kind = detect_layout(path)
    report = InspectReport(path, kind, kind)
    if kind == "megatron":
        unit = open_unit(path)
        stored, files, config = unit.stored, unit.files, {}
        _megatron_facts(report, path, unit)
        report.manifest = _manifest(unit.path)
    else:
        checkpoint = open_hf(path)
        stored, files, config = checkpoint.stored, checkpoint.files, checkpoint.config
        _hf_facts(report, checkpoint)
        report.manifest = _manifest(path)
    report.model_type = str(config.get("model_type", ""))
    _sizes(report, stored, files)
    _understand(report, path, options)
    if match is not None:
        report.tensors = _lines(stored, files, match)
    return report


def _understand(report: InspectReport, path: Path, options: SourceOptions) -> None:
    """What the family's bridge makes of it, where there is one."""
    try:
        source = open_source(path, options)
    except DataError as error:
        report.why = str(error)
        return
    report.understood = True
    report.layout = describe_layout(source)
    report.model_type = source.spec.model_type
    report.titles = list(get_bridge(source.spec.model_type).titles)
    report.defects = len(source.defects)
    report.model = _model(source)
    report.evidence = source.evidence


def _sizes(report: InspectReport, stored: Mapping[str, StoredTensor], files: list[StorageObject]) -> None:
    lines: dict[str, DtypeLine] = {}
    for tensor in stored.values():
        line = lines.setdefault(tensor.dtype.label, DtypeLine(tensor.dtype.label, 0, 0, 0))
        line.tensors += 1
        line.parameters += prod(tensor.shape)
        line.bytes += tensor.nbytes
    report.dtypes = sorted(lines.values(), key=lambda line: -line.bytes)
    parameters = sum(line.parameters for line in lines.values())
    report.facts["tensors"] = f"{len(stored):,}"
    report.facts["parameters"] = f"{parameters:,}"
    report.facts["files"] = f"{len(files):,} with weights, {sum(file.size for file in files):,} bytes"


def _hf_facts(report: InspectReport, checkpoint: HfCheckpoint) -> None:
    side = find_side_files(checkpoint.path)
    report.facts["index"] = "yes" if checkpoint.index is not None else "none, one file"
    report.facts["side files"] = ", ".join(map(str, side.files)) or "none"
    if side.left:
        report.facts["other files"] = grouped(side.left)
    block = checkpoint.config.get("quantization_config")
    if isinstance(block, dict):
        report.facts["quantised"] = str(block.get("quant_method", "yes"))


def _megatron_facts(report: InspectReport, path: Path, unit: Unit) -> None:
    root = locate(path).root
    report.facts["unit"] = str(unit.path) if unit.path != root else "the path itself"
    report.facts["iteration"] = "release" if unit.iteration is None else str(unit.iteration)
    cut = sum(len(tensor.chunks) for tensor in unit.stored.values())
    report.facts["chunks"] = f"{cut:,}"
    report.facts["objects"] = f"{len(unit.metadata.objects):,} (extra states and the like)"
    state = unit.trainer_state
    report.facts["trainer's state"] = (
        f"{len(state):,} tensors, {sum(state.values()):,} bytes" if state else "none"
    )
    try:
        common = read_common(unit.path, unit.metadata)
    except DataError as error:
        report.facts["common state"] = f"cannot be read: {error.what}"
        return
    report.facts["common state"] = ", ".join(sorted(common)) or "empty"
    for name in ("iteration", "checkpoint_version"):
        if name in common:
            report.facts[f"common {name}"] = str(common[name])


def _manifest(unit: Path) -> dict[str, Any] | None:
    """The manifest without its list of files."""
    manifest = read_manifest(unit / FILE)
    if manifest is None:
        return None
    files = manifest.pop("files", None)
    manifest["files"] = len(files) if isinstance(files, list) else 0
    return manifest


def _model(source: Source) -> dict[str, str]:
    """The model's structure in words."""
    spec = source.spec
    told = {
        "layers": f"{spec.num_layers}, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}",
        "attention": f"{spec.num_heads} heads"
        + (f" in {spec.num_groups} groups" if spec.mla is None else ", latent (MLA)"),
        "embeddings": "tied" if spec.tied else "not tied",
    }
    if spec.moe is not None:
        dense = [layer for layer in range(spec.num_layers) if not spec.is_moe(layer)]
        told["experts"] = (
            f"{spec.moe.num_experts} a layer, top {spec.moe.top_k}; dense layers: {ranges(dense) or 'none'}"
        )
    told["MTP layers"] = f"{spec.num_mtp}"
    if spec.dsa is not None:
        owners = [layer for layer in range(spec.num_layers) if spec.dsa.full[layer]]
        told["indexers"] = (
            f"{len(owners)} decoder layers own one: {ranges(owners)}; "
            f"{_indexers_in_files(source)} in the files, MTP included"
        )
    if source.kind == "megatron":
        told["layer keys"] = "stacked" if source.stacked else "per layer"
    return told


def _indexers_in_files(source: Source) -> int:
    names = templates(source.table, INDEXER)
    return sum(
        any(name.replace("{layer}", layer.prefix) in source.tensors for name in names)
        for layer in layers(source.table, source.spec)
    )


def ranges(numbers: list[int]) -> str:
    """``0-2, 6, 10`` of sorted numbers."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def _lines(stored: Mapping[str, StoredTensor], files: list[StorageObject], match: str) -> list[TensorLine]:
    base = [Path(file.address).name for file in files]
    return [
        TensorLine(
            name,
            tensor.dtype.label,
            list(tensor.shape),
            tensor.nbytes,
            sorted(Counter(base[chunk.file] for chunk in tensor.chunks)),
        )
        for name, tensor in stored.items()
        if fnmatch.fnmatchcase(name, match)
    ]
