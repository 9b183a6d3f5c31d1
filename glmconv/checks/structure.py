"""What headers and config say: the source's own defects, stray files, MTP, trainer's state."""

from __future__ import annotations

import json
from pathlib import Path

from glmconv.basics.errors import DataError, Defect
from glmconv.checks.findings import CheckReport
from glmconv.checks.subject import Subject, mtp_prefix
from glmconv.formats.safetensors.checkpoint import INDEX
from glmconv.formats.safetensors.header import read_header
from glmconv.formats.torchdist.common import COMMON_FILE, read_common
from glmconv.formats.torchdist.metadata import read_metadata
from glmconv.source.source import Source
from glmconv.source.torchdist.location import locate

CHECKPOINT_VERSION = 3.0
"""The order of fused QKV rows that all tables describe (Megatron-LM, `fix_query_key_value_ordering`)."""

MTP_SEARCHED = 16
"""MTP layers beyond the config's that are looked for."""


def explain_unopened(report: CheckReport, error: DataError) -> None:
    """The defects of a checkpoint that cannot be opened, as findings."""
    report.facts["opened"] = "no: nothing further could be checked"
    if error.defects:
        report.findings += error.defects
    else:
        report.findings.append(Defect("unreadable", error.what, error.where, error.hint))


def check_structure(report: CheckReport, subject: Subject) -> None:
    """All defects and warnings of an opened source, and facts about it."""
    source = subject.source
    report.findings += [*source.defects, *source.warnings]
    _facts(report, source)
    _mtp(report, source)
    if source.kind == "hf":
        _stray_files(report, source)
        _total_size(report, source)
    else:
        _surroundings(report, locate(source.path).unit_dir)


def _facts(report: CheckReport, source: Source) -> None:
    spec, moe = source.spec, source.spec.moe
    report.facts["tensors"] = f"{len(source.stored):,} in {len(source.files):,} files"
    report.facts["layers"] = f"{spec.num_layers}" + (
        f", {sum(spec.moe_layers)} of them with experts" if moe is not None else ""
    )
    if moe is not None:
        report.facts["experts"] = f"{moe.num_experts} a layer, top {moe.top_k}"
    if source.evidence:
        wrong = sum(not one.agrees for one in source.evidence)
        verdict = f"{wrong} contradict config.json" if wrong else "config.json agrees with all"
        report.facts["trainer's args"] = f"{len(source.evidence)} statements compared, {verdict}"
    if source.trainer_bytes:
        count = next(
            (one.name for one in source.dropped if one.reason == "trainer's state"), "trainer's state"
        )
        report.facts["trainer's state"] = f"{count}, {source.trainer_bytes:,} bytes: present, not checked"
    elif source.kind == "megatron":
        report.facts["trainer's state"] = "none"


def _mtp(report: CheckReport, source: Source) -> None:
    """MTP layers as the config says: fewer show as missing tensors, more are named here."""
    spec, field = source.spec, source.bridge.mtp_field
    said = "config.json says so" if field in source.config else "counted, config.json does not say"
    if field is not None:
        report.facts["MTP"] = f"{spec.num_mtp} layer(s), {said}"
    for i in range(spec.num_mtp, spec.num_mtp + MTP_SEARCHED):
        prefix = mtp_prefix(source.table, spec, source.kind, i)
        held = [name for name in source.stored if name.startswith(prefix)]
        if held:
            report.note(
                "mtp",
                f"the files hold {len(held)} tensors of an MTP layer beyond the {spec.num_mtp} that "
                f"config.json promises ({field})",
                prefix.removesuffix("."),
                "correct the field, or remove the layer's tensors",
            )


def _surroundings(report: CheckReport, unit: Path) -> None:
    """What trainers read beside the tensors: `metadata.json` and the common state."""
    if not (unit / "metadata.json").is_file():
        what = "is missing: megatron-core does not take the directory for a checkpoint without it"
        report.note("common-state", what, str(unit / "metadata.json"), severity="warning")
    try:
        metadata = None if (unit / COMMON_FILE).is_file() else read_metadata(unit)
        common = read_common(unit, metadata)
    except DataError as error:
        report.note("common-state", error.what, error.where, error.hint, "warning")
        return
    version = common.get("checkpoint_version")
    if version != CHECKPOINT_VERSION:
        report.note(
            "common-state",
            f"checkpoint_version is {version}: Megatron-LM takes fused QKV for an older order and moves it",
            str(unit),
            f"runtimes of megatron-core expect {CHECKPOINT_VERSION}",
            "warning",
        )


def _stray_files(report: CheckReport, source: Source) -> None:
    """Safetensors files that the index does not name: nothing reads them, which may be a loss."""
    known = {Path(file.address).name for file in source.files}
    for file in sorted(source.path.glob("*.safetensors")):
        if file.name in known:
            continue
        try:
            names = [entry.name for entry in read_header(file).entries]
        except DataError as error:
            report.note(
                "stray-file", f"not named by the index, and {error.what}", str(file), severity="warning"
            )
            continue
        new = [name for name in names if name not in source.stored]
        shown = f", {len(new)} of them in no other file ({', '.join(new[:3])} …)" if new else ""
        report.note(
            "stray-file",
            f"not named by the index: its {len(names)} tensors are never read{shown}",
            str(file),
            "rebuild the index where they belong to the model",
            "warning",
        )


def _total_size(report: CheckReport, source: Source) -> None:
    """The index's ``total_size``, which some writers get wrong; loaders use it for planning only."""
    if source.origin is None or source.origin.index is None:
        return
    metadata = json.loads(source.origin.index).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.nbytes for tensor in source.stored.values())
    if said is not None and said != held:
        report.note(
            "total-size",
            f"metadata.total_size is {said}, the files hold {held} bytes of tensors",
            str(source.path / INDEX),
            severity="warning",
        )
