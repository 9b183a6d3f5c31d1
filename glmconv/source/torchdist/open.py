"""Open a torch_dist checkpoint, whoever wrote it, as a source of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from glmconv.basics.digest import digest_bytes
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.basics.json_files import read_json
from glmconv.formats.safetensors.checkpoint import INDEX, SINGLE, open_hf
from glmconv.formats.safetensors.origin import FILE as ORIGIN_FILE
from glmconv.formats.safetensors.origin import Origin
from glmconv.formats.stored import StoredChunk, StoredTensor
from glmconv.formats.torchdist.metadata import Metadata, payload_offsets, read_metadata
from glmconv.source.conditions import Dropped
from glmconv.source.locate import locate
from glmconv.source.manifest import FILE as MANIFEST_FILE
from glmconv.source.manifest import HF_DIR, read_dialect, read_manifest, read_widened
from glmconv.source.quantised import refuse_quantised
from glmconv.source.safetensors import open_hf_source
from glmconv.source.same_model import differences
from glmconv.source.settle import settle
from glmconv.source.source import Source, SourceOptions, family_of
from glmconv.source.surplus import drop_surplus_mtp, explain_layers
from glmconv.source.torchdist.location import locate as find_unit
from glmconv.source.torchdist.padding import accept_declared_padding
from glmconv.source.torchdist.spellings import is_trainer_state, normalise
from glmconv.source.torchdist.statements import read_statements
from glmconv.source.torchdist.unsaid import (
    TIE_FIELD,
    note_tied,
    run_args,
    tied_by_its_run,
    zero_router_biases,
)
from glmconv.storage.local import identify
from glmconv.storage.objects import StorageObject
from glmconv.tables.config_from_args import (
    ArgsReader,
    family_said,
    first_statement,
    made_warning,
    unnamed_family,
)
from glmconv.tables.expand import Layout, megatron_layout
from glmconv.tables.registry import FAMILIES, get_bridge
from glmconv.tables.rules import DIALECTS, Table
from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import Fields


@dataclass(slots=True)
class Unit:
    """One iteration directory opened: tensors of the model in the common spelling, and the rest."""

    path: Path
    root: Path
    iteration: int | None
    stored: dict[str, StoredTensor]
    files: list[StorageObject]
    metadata: Metadata
    trainer_state: dict[str, int]


def open_unit(path: Path) -> Unit:
    """Open a torch_dist root, ``iter_NNNNNNN`` or ``release`` directory: headers and places only.

    Raises StorageError or DataError (every defect of ``.metadata`` and the records listed).
    """
    located = find_unit(path)
    unit = located.unit_dir
    metadata = read_metadata(unit)
    model = [name for name in metadata.tensors if not is_trainer_state(name)]
    _refuse_overlaps(unit, metadata)
    offsets = payload_offsets(unit, metadata, model)
    files, numbers = _files(unit, metadata, model)
    stored = {}
    for name in model:
        entry = metadata.tensors[name]
        chunks = [
            StoredChunk(chunk.offsets, chunk.sizes, numbers[chunk.file], offset)
            for chunk, offset in zip(entry.chunks, offsets[name], strict=True)
        ]
        stored[name] = StoredTensor(name, entry.dtype, entry.shape, chunks)
    skipped = {
        name: StoredTensor(name, entry.dtype, entry.shape, []).nbytes
        for name, entry in metadata.tensors.items()
        if is_trainer_state(name)
    }
    return Unit(unit, located.root, located.iteration, normalise(stored), files, metadata, skipped)


def _refuse_overlaps(unit: Path, metadata: Metadata) -> None:
    """Each record is its own: two chunks in the same bytes mean that a writer lost one of them."""
    records: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in metadata.tensors.items():
        for chunk in entry.chunks:
            records.setdefault(chunk.file, []).append((chunk.offset, chunk.offset + chunk.length, name))
    defects = [
        Defect("overlap", f"a chunk of {name} and one of {other} lie in the same bytes, at {start}", file)
        for file, spans in records.items()
        for (_, end, other), (start, _, name) in pairwise(sorted(spans))
        if start < end
    ]
    if defects:
        raise DataError("records overlap", where=str(unit / ".metadata"), defects=defects)


def _files(
    unit: Path, metadata: Metadata, names: Iterable[str]
) -> tuple[list[StorageObject], dict[str, int]]:
    used = sorted({chunk.file for name in names for chunk in metadata.tensors[name].chunks})
    digest = digest_bytes((unit / ".metadata").read_bytes())
    return [identify(unit / name, digest) for name in used], {name: i for i, name in enumerate(used)}


def open_megatron_source(path: Path, options: SourceOptions) -> Source:
    """Open a torch_dist checkpoint; config and side files come from it or ``origin_hf_dir``.

    Raises StorageError and DataError; what is missing or unexpected is listed in ``defects``.
    """
    options.check()
    unit = open_unit(path)
    statements = read_statements(unit.path, unit.metadata)
    hf_dir = None if options.config_from_args else _hf_dir(unit, options.origin_hf_dir)
    config = _made_config(unit, statements, options) if hf_dir is None else read_json(hf_dir / "config.json")
    bridge = family_of(config, options.model_type, hf_dir or unit.path)
    # A config that names a quantisation would be written beside weights that have none.
    refuse_quantised(config, unit.stored, hf_dir or unit.path)
    args = run_args(unit.path, unit.metadata)
    tied = tied_by_its_run(bridge.table, config, unit.stored, args)
    config |= {TIE_FIELD: True} if tied else {}
    spec = bridge.spec(config, _mtp_shapes(bridge.table, config, unit.stored))
    if hf_dir is None and bridge.mtp_field is not None:
        config[bridge.mtp_field] = spec.num_mtp
    layout = _choose_layout(bridge.table, spec, unit, options.dialect)
    found = locate((layout,), unit.stored)
    source = Source(
        path,
        "megatron",
        bridge,
        spec,
        config,
        layout.name,
        unit.files,
        tensors=found.tensors,
        stored=unit.stored,
        hf_dir=hf_dir,
        origin=_origin(hf_dir) if hf_dir is not None else None,
        stacked=layout.stacked,
        widened=read_widened(unit.path / MANIFEST_FILE),
        statements=statements,
        config_from_args=hf_dir is None,
    )
    source.warnings += spec.remarks
    if tied:
        note_tied(source)
    if hf_dir is None:
        source.warnings.append(made_warning(statements[0]))
    elif hf_dir != unit.path / HF_DIR:
        source.config_from = hf_dir / "config.json"
        _against_own_config(source, unit)
    zero_router_biases(source, found, args)
    if options.drop_mtp:
        drop_surplus_mtp(source, found)
    explain_layers(source, found.unused)
    for name, tensor in found.unused.items():
        source.defects.append(
            Defect("unexpected", f"{tensor.dtype.label}{list(tensor.shape)} belongs to no rule", name)
        )
    settle(source, found, options, open_hf_source)
    accept_declared_padding(source, args)
    if unit.trainer_state:
        total = sum(unit.trainer_state.values())
        source.trainer_bytes = total
        source.dropped.append(
            Dropped(f"{len(unit.trainer_state)} optimizer tensors", "trainer's state", total)
        )
    return source


def _own_config(unit: Unit) -> Path | None:
    folders = (unit.path / HF_DIR, unit.path, unit.root)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _hf_dir(unit: Unit, given: Path | None) -> Path:
    """Where the config is: named, in the unit's ``hf``, in the unit, or beside the tracker."""
    found = given or _own_config(unit)
    if found is not None:
        return found
    raise DataError(
        "the checkpoint carries no Hugging Face config",
        where=str(unit.path),
        hint="name the model's HF directory with --origin-hf-dir (config.json and tokenizer suffice), or let "
        "--config-from-args make one of what the trainer wrote down",
    )


def _made_config(unit: Unit, statements: list[Fields], options: SourceOptions) -> dict[str, Any]:
    """The config that the trainer's args say. Raises UsageError where there is one, or no family is named."""
    there = options.origin_hf_dir or _own_config(unit)
    if there is not None:
        raise UsageError(
            "--config-from-args is for a checkpoint without a Hugging Face config, and there is one",
            where=str(there),
            hint="leave --config-from-args away",
        )
    fields = first_statement(statements, unit.path)
    family = options.model_type or family_said(statements, FAMILIES)
    if family is None:
        raise unnamed_family(unit.path, FAMILIES)
    make = get_bridge(family).config_of
    if make is None:
        raise UsageError(f"--config-from-args: args do not suffice for {family}", hint="--origin-hf-dir")
    reader = ArgsReader(fields)
    config = make(reader)
    reader.finish(family)
    return config


def _origin(hf_dir: Path) -> Origin | None:
    """How the original HF files were cut, where that is known."""
    record = hf_dir / ORIGIN_FILE
    if record.is_file():
        return Origin.from_file(record)
    if (hf_dir / INDEX).is_file() or (hf_dir / SINGLE).is_file():
        try:
            return Origin.of(open_hf(hf_dir))
        except DataError:
            # An index without its shards is common in a directory that holds config and tokenizer only.
            return None
    return None


def _mtp_shapes(
    table: Table, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """MTP layers of the file under the HF names that a bridge counts, for configs that do not say."""
    layers, shapes, i = config.get("num_hidden_layers"), {}, 0
    while isinstance(layers, int) and (
        one := stored.get(table.mtp.mcore.replace("{n}", str(i)) + ".enorm.weight")
    ):
        number = layers + i if table.mtp.hf_after_layers else i
        shapes[table.mtp.hf.replace("{n}", str(number)) + ".enorm.weight"] = one.shape
        i += 1
    return shapes


def _has_stacked_layers(table: Table, stored: Mapping[str, StoredTensor]) -> bool:
    first = table.layer.mcore.replace("{n}", "0") + "."
    return not any(name.startswith(first) for name in stored)


def _names(layout: Layout) -> set[str]:
    return {part.stored for part in layout.parts}


def _skeleton(spec: ModelSpec) -> ModelSpec:
    """The same model with one expert: the same stored names, quick to expand."""
    return spec if spec.moe is None else replace(spec, moe=replace(spec.moe, num_experts=1))


def _against_own_config(source: Source, unit: Unit) -> None:
    """A config from elsewhere must not contradict the one that a conversion left in the unit.

    That one steered how the tensors were written: what moves them must be the same.
    """
    manifest = read_manifest(unit.path / MANIFEST_FILE)
    own = unit.path / HF_DIR / "config.json"
    if manifest is None or not own.is_file():
        return
    config = read_json(own)
    if config.get("model_type") != source.spec.model_type:
        raise DataError(
            f"is a {source.spec.model_type}, but the unit was written as {config.get('model_type')}",
            where=str(source.hf_dir),
            hint="leave --origin-hf-dir away: the unit has its own config",
        )
    spec = source.bridge.spec(config, _mtp_shapes(source.table, config, unit.stored))
    for one in differences(spec, source.spec):
        what = f"{one}: the first in {own}, by which the tensors were written"
        hint = "leave --origin-hf-dir away: the unit has its own config"
        found = Defect("config", what, str(source.hf_dir), hint, "error" if one.moves else "warning")
        (source.defects if one.moves else source.warnings).append(found)


def _choose_layout(table: Table, spec: ModelSpec, unit: Unit, given: str | None) -> Layout:
    """The dialect whose names the file has: from the manifest, given, or found.

    Raises UsageError where a given one contradicts the manifest, DataError where none can be told.
    """
    stacked = _has_stacked_layers(table, unit.stored)
    written = read_dialect(unit.path / MANIFEST_FILE)
    if given is not None and written is not None and given != written:
        raise UsageError(
            f"the dialect is said to be {given}, but {MANIFEST_FILE} says that it was written as {written}",
            where=str(unit.path),
            hint="leave the option away; if something else rewrote the tensors since, the manifest no longer "
            "describes them: convert a copy without it",
        )
    dialect = given or written
    if dialect is not None:
        return megatron_layout(table, spec, dialect, stacked)
    skeleton, have = _skeleton(spec), set(unit.stored)
    distance = {
        name: len(_names(megatron_layout(table, skeleton, name, stacked)) ^ have) for name in DIALECTS
    }
    best = [name for name in DIALECTS if distance[name] == min(distance.values())]
    first = megatron_layout(table, skeleton, best[0], stacked)
    for other in best[1:]:
        if megatron_layout(table, skeleton, other, stacked).parts != first.parts:
            raise DataError(
                f"the names fit {' and '.join(best)}, which order this model's tensors differently",
                where=str(unit.path),
                hint=f"say which trainer wrote it: --dialect {best[0]} or --dialect {other} "
                "(--from-dialect where another is written)",
            )
    return megatron_layout(table, spec, best[0], stacked)
