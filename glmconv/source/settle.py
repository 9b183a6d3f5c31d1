"""What is missing from a checkpoint, or contradicts its config: dropped, filled, allowed or a defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from glmconv.basics.errors import DataError, Defect
from glmconv.source.conditions import Dropped
from glmconv.source.evidence import compare, findings
from glmconv.source.locate import Found
from glmconv.source.same_model import differences
from glmconv.source.source import Source, SourceOptions
from glmconv.source.surplus import BY_DROP_MTP
from glmconv.tables.config import DTYPE_FIELDS
from glmconv.tables.expand import HfTensor, hf_layout
from glmconv.tables.rules import UNTIED, Table

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


OpenHf = Callable[[Path, SourceOptions], Source]
"""How another Hugging Face checkpoint is opened and judged, where missing tensors come from one."""


def settle(source: Source, found: Found, options: SourceOptions, open_hf_source: OpenHf) -> None:
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
        _fill(source, missing, open_hf_source, options.fill_missing_from)
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


def _fill(source: Source, missing: dict[str, HfTensor], open_hf_source: OpenHf, path: Path) -> None:
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
