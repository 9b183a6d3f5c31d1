"""A Hugging Face checkpoint as a source."""

from __future__ import annotations

from pathlib import Path

from glmconv.basics.errors import UsageError
from glmconv.formats.safetensors.checkpoint import HfCheckpoint, open_hf
from glmconv.formats.safetensors.origin import Origin
from glmconv.source.locate import locate
from glmconv.source.quantised import refuse_quantised
from glmconv.source.settle import settle
from glmconv.source.source import Source, SourceOptions, family_of
from glmconv.source.surplus import drop_surplus_mtp, explain_unused
from glmconv.tables.expand import Layout, hf_layout


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
    settle(source, found, options, open_hf_source)
    return source


def _hf_name(hub: Layout, stacked: Layout, checkpoint: HfCheckpoint) -> str:
    own = {part.stored for part in stacked.parts} - {part.stored for part in hub.parts}
    return "hf-stacked" if any(name in checkpoint.stored for name in own) else "hf"
