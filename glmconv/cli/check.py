"""``glmconv check``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glmconv.basics.errors import UsageError

if TYPE_CHECKING:
    from glmconv.checks.findings import CheckReport, ComparedPart, IndexerReport

FINDINGS_SHOWN = 20
"""Findings of one kind that are printed; ``--json`` has all."""


def command(
    path: Annotated[
        Path | None, typer.Argument(help="An HF directory, a torch_dist root or one iteration of it.")
    ] = None,
    values: Annotated[
        bool,
        typer.Option("--values", help="Read every tensor: NaN, Inf, all zeros, experts that repeat another."),
    ] = False,
    hashes: Annotated[
        bool, typer.Option("--hash", help="Read every byte and compare with the hashes in glmconv.json.")
    ] = False,
    stages: Annotated[
        int | None,
        typer.Option(
            "--pp",
            metavar="N",
            min=1,
            help="Does it split into N pipeline stages without cutting a shared index?",
        ),
    ] = None,
    first_stage: Annotated[
        int | None,
        typer.Option(
            "--pp-first", "--decoder-first-pipeline-num-layers", min=1, help="Layers of the first stage."
        ),
    ] = None,
    last_stage: Annotated[
        int | None,
        typer.Option(
            "--pp-last", "--decoder-last-pipeline-num-layers", min=1, help="Layers of the last stage."
        ),
    ] = None,
    indexer: Annotated[
        bool,
        typer.Option("--check-dsa-indexer", help="Report the sparse-attention indexer, layer by layer."),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="HF_DIR",
            help="With --check-dsa-indexer: compare the order of channels with this checkpoint.",
        ),
    ] = None,
    model_path: Annotated[Path | None, typer.Option(help="The same as PATH.")] = None,
    origin_hf_dir: Annotated[
        Path | None, typer.Option(help="HF config of a torch_dist that carries none.")
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(help="Dialect of a torch_dist, where it cannot be told.")
    ] = None,
    config_from_args: Annotated[
        bool,
        typer.Option(
            "--config-from-args",
            help="Make the HF config of a torch_dist without one from its args.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Whatever in config.json contradicts the trainer's args is an error."),
    ] = False,
    model_type: Annotated[str | None, typer.Option(help="Checked against config.json.")] = None,
    drop_mtp: Annotated[bool, typer.Option("--drop-mtp", help="Check without the MTP layers.")] = False,
    workers: Annotated[int, typer.Option("-j", "--workers", min=1, help="Threads that read.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="No progress.")] = False,
) -> None:
    """Say what is wrong with a checkpoint; exit 0 where all checked things hold, 1 where not.

    Structure, router biases and duplicates are always checked; [bold]--values[/bold] and
    [bold]--hash[/bold] read every byte.
    """
    if path is not None and model_path is not None:
        raise UsageError("PATH and --model-path are both given", hint="they mean the same: give one")
    place = path or model_path
    if place is None:
        raise UsageError("PATH is missing", hint="glmconv check CHECKPOINT")
    from glmconv.checks.findings import CheckOptions
    from glmconv.cli.output import print_json, progress_bar
    from glmconv.commands.check import check
    from glmconv.source.source import SourceOptions

    options = CheckOptions(
        source=SourceOptions(
            model_type=model_type,
            dialect=dialect,
            origin_hf_dir=origin_hf_dir,
            drop_mtp=drop_mtp,
            config_from_args=config_from_args,
            strict=strict,
        ),
        hashes=hashes,
        values=values,
        pipeline_stages=stages,
        first_stage_layers=first_stage,
        last_stage_layers=last_stage,
        indexer=indexer,
        against=against,
        workers=workers,
    )
    with progress_bar("checking", quiet) as progress:
        report = check(place, options, progress)
    if as_json:
        print_json(report.to_json())
    else:
        show(report)
    raise typer.Exit(report.exit_code)


def show(report: CheckReport) -> None:
    """The report as tables; the verdict stands last."""
    from glmconv.cli.output import facts, say, size, table

    told = {"path": str(report.path), "layout": report.layout, "model": report.model_type, **report.facts}
    if report.locked:
        told["router biases"] = _locked(report)
    if report.scanned is not None:
        told["values"] = f"{report.scanned:,} tensors read"
    if report.hashes is not None:
        read = f"{report.hashes.payloads:,} payloads in {report.hashes.files:,} files"
        told["hashes"] = f"{read}, {size(report.hashes.bytes)} read, {report.hashes.wrong} wrong"
    facts("checked", {name: value for name, value in told.items() if value})
    if report.pipeline is not None:
        _show_pipeline(report)
    if report.indexer is not None:
        _show_indexer(report.indexer)
    shown: Counter[str] = Counter()
    rows = []
    for finding in sorted(report.findings, key=lambda finding: (finding.severity != "error", finding.kind)):
        shown[finding.kind] += 1
        if shown[finding.kind] <= FINDINGS_SHOWN:
            hint = f"\n({finding.hint})" if finding.hint else ""
            rows.append((finding.severity, finding.kind, finding.where, f"{finding.what}{hint}"))
    for kind, count in shown.items():
        if count > FINDINGS_SHOWN:
            rows.append(("", kind, f"… {count - FINDINGS_SHOWN:,} more", "--json lists all"))
    if rows:
        table("findings", ("", "kind", "where", "what"), rows)
    errors, warnings = len(report.errors), len(report.warnings)
    verdict = "all checked things hold" if report.ok else f"{errors:,} {'error' if errors == 1 else 'errors'}"
    counted = f", {warnings:,} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    say(f"{verdict}{counted} ({size(report.bytes_read)} read in {report.seconds:.1f} s)")


def _locked(report: CheckReport) -> str:
    dtypes = Counter(one.dtype for one in report.locked)
    fewest = min(report.locked, key=lambda one: one.distinct / one.size)
    kinds = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.items())
    return f"{kinds}; fewest distinct values: {fewest.distinct} of {fewest.size} ({fewest.name})"


def _show_pipeline(report: CheckReport) -> None:
    from glmconv.cli.output import facts
    from glmconv.commands.inspect import ranges

    if report.pipeline is None:
        return
    split = report.pipeline
    stages = ", ".join(f"{start}-{stop - 1}" for start, stop in split.stages)
    told = {"stages": stages or "does not split evenly", "valid starts": ranges(split.valid_starts)}
    if split.suggestion:
        told["works"] = split.suggestion
    facts(f"{split.count} pipeline stages", told)


def _show_indexer(indexer: IndexerReport) -> None:
    from glmconv.cli.output import facts, say
    from glmconv.commands.inspect import ranges

    # Scripts look for these lines: plain, whole, one number each.
    say(f"DSA indexer modules found: {len(indexer.found)}")
    if not indexer.owners:
        return
    say(f"DSA indexer modules in MTP layers: {len(indexer.mtp_found)}")
    told = {"layers that compute": ranges(indexer.owners)}
    lacking = sorted({*indexer.owners, *indexer.mtp_expected} - {*indexer.found, *indexer.mtp_found})
    if lacking:
        told["not in the files"] = ranges(lacking)
    told["layers that share"] = _sharing(indexer) or "none"
    told["frequency, offset"] = f"{indexer.frequency}, {indexer.offset}"
    for part in indexer.parts:
        shapes = " or ".join(str(shape) for shape in part.shapes)
        told[part.part] = f"{', '.join(part.dtypes)} {shapes}" if part.shapes else "missing"
    facts("indexer", told)
    if indexer.against is not None:
        _show_compared(indexer)


def _sharing(indexer: IndexerReport) -> str:
    from glmconv.commands.inspect import ranges

    by_owner: dict[int, list[int]] = {}
    for layer, owner in indexer.sources.items():
        by_owner.setdefault(owner, []).append(layer)
    return "; ".join(f"{ranges(layers)} from {owner}" for owner, layers in by_owner.items())


def _show_compared(indexer: IndexerReport) -> None:
    """One row a tensor where all layers agree, else one a layer."""
    from glmconv.cli.output import table
    from glmconv.commands.inspect import ranges

    groups: dict[tuple[str, str, str, bool], list[ComparedPart]] = {}
    for one in indexer.compared:
        groups.setdefault((one.part, one.order, one.expected, one.right), []).append(one)
    rows = [
        (part, ranges(sorted(one.layer for one in group)), order, expected, "right" if right else "WRONG")
        for (part, order, expected, right), group in groups.items()
    ]
    title = f"stored order beside {indexer.against}"
    table(title, ("tensor", "layers", "is", "right for the layout", "verdict"), rows)
