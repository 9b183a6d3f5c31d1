"""Two checkpoints that are to be the same model, opened and checked before anything heavy is done."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.source.open import open_source
from glmconv.source.source import Source, SourceOptions
from glmconv.source.torchdist.location import detect_layout
from glmconv.source.torchdist.location import locate as find_unit
from glmconv.tables.spec import ModelSpec
from glmconv.verify.mcore.config import require_carried

PACKAGES = (("torch", "torch"), ("transformers", "transformers"), ("megatron.core", "megatron-core"))
INSTALL = "pip install 'glmconv[verify]'"
NOT_STRUCTURE = ("raw", "remarks", "dtype", "max_positions", "num_mtp")
"""Fields in which two configs of one model may differ; MTP layers are compared by their tensors."""


@dataclass(slots=True)
class Pair:
    """Both sources, sound and of one structure. ``unit`` is the directory with ``.metadata``."""

    hf: Source
    megatron: Source
    unit: Path
    warnings: list[str]

    @property
    def spec(self) -> ModelSpec:
        return self.hf.spec


def require_packages() -> dict[str, str]:
    """Versions of what runs the models. Raises UsageError with the command that installs it."""
    absent, found = [], {}
    for module, distribution in PACKAGES:
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            absent.append(distribution)
            continue
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "unknown"
    if absent:
        raise UsageError(f"verify runs both models and needs {' and '.join(absent)}", hint=INSTALL)
    return found


def choose_device(wanted: str) -> str:
    """``cpu`` or ``cuda``. Raises UsageError where there is no GPU, or where it cannot be left alone.

    megatron-core goes to the GPU wherever torch sees one, so ``cpu`` hides it.
    """
    if wanted == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UsageError("torch sees no GPU", hint="--device cpu, or install a torch built for CUDA")
    if wanted == "cpu" and there:
        raise UsageError(
            "torch has already taken the GPU, so megatron-core cannot be kept on the CPU",
            hint="start with CUDA_VISIBLE_DEVICES= in the environment",
        )
    return "cuda" if there and wanted != "cpu" else "cpu"


def open_pair(hf: Path, megatron: Path, dialect: str | None = None) -> Pair:
    """Open both sides and compare their structure.

    A torch_dist without a config of its own is read with that of the HF directory. MTP layers
    that the HF directory lacks are left out, with a warning. Raises DataError for checkpoints
    that are not sound or are different models, UsageError for arguments in the wrong order and for
    configs that say what cannot be carried to Megatron.
    """
    _require_kinds(hf, megatron)
    warnings = []
    theirs = open_source(hf)
    if theirs.spec.num_mtp and _only_mtp_is_missing(theirs):
        warnings.append("the HF directory has no MTP layer, so the MTP head was not compared")
        theirs = open_source(hf, SourceOptions(drop_mtp=True))
    theirs.require_sound()
    unit = find_unit(megatron).unit_dir
    options = SourceOptions(dialect=dialect, drop_mtp=theirs.spec.num_mtp == 0)
    if not (unit / "hf" / "config.json").is_file():
        options = replace(options, origin_hf_dir=hf)
    ours = open_source(megatron, options)
    _require_same_structure(theirs, ours)
    require_carried(theirs.spec, ours.spec)
    ours.require_sound()
    said = [*theirs.spec.remarks, *ours.spec.remarks]
    warnings += dict.fromkeys(str(remark) for remark in said)
    return Pair(theirs, ours, unit, warnings)


def _require_kinds(hf: Path, megatron: Path) -> None:
    kinds = {path: detect_layout(path) for path in (hf, megatron)}
    if kinds[hf] == "megatron" and kinds[megatron] == "hf":
        raise UsageError("the arguments are in the wrong order", hint=f"glmconv verify {megatron} {hf}")
    if kinds[hf] != "hf":
        raise UsageError(
            "is no Hugging Face directory", where=str(hf), hint="glmconv verify HF_DIR MEGATRON_DIR"
        )
    if kinds[megatron] != "megatron":
        raise UsageError(
            "is no torch_dist checkpoint",
            where=str(megatron),
            hint=f"make one: glmconv convert {hf} MEGATRON_DIR",
        )


def _only_mtp_is_missing(source: Source) -> bool:
    prefixes = tuple(f"model.layers.{source.spec.num_layers + i}." for i in range(source.spec.num_mtp))
    return bool(source.defects) and all(
        defect.kind == "missing" and (not defect.where or defect.where.startswith(prefixes))
        for defect in source.defects
    )


def _require_same_structure(theirs: Source, ours: Source) -> None:
    """Raise DataError with every field in which the two configs describe different models."""
    defects = []
    for field in fields(ModelSpec):
        a, b = getattr(theirs.spec, field.name), getattr(ours.spec, field.name)
        if field.name not in NOT_STRUCTURE and a != b:
            defects.append(Defect("different", f"{field.name} is {a} in HF, {b} in Megatron"))
    if not defects:
        return
    vocabulary = any(defect.what.startswith("vocab_size") for defect in defects)
    raise DataError(
        "the two checkpoints are different models"
        + (" (another vocabulary)" if vocabulary and len(defects) == 1 else ""),
        where=f"{theirs.path} and {ours.path}",
        defects=defects,
        hint=f"compare the checkpoints that belong together, or convert anew: "
        f"glmconv convert {theirs.path} NEW_DIR",
    )
