"""``glmconv inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from glmconv.commands.inspect import InspectReport

_MANIFEST_SHOWN = (
    "version",
    "layout",
    "dialect",
    "source",
    "plan_digest",
    "dtype",
    "hash",
    "files",
    "seconds",
)


def command(
    path: Annotated[Path, typer.Argument(help="An HF directory, a torch_dist root or one iteration of it.")],
    match: Annotated[
        str | None,
        typer.Argument(metavar="[GLOB]", help="List tensors whose names fit, e.g. '*.indexer.*'."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List tensors: all, or those that fit GLOB.")
    ] = False,
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
    model_type: Annotated[str | None, typer.Option(help="Checked against config.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what a path holds: layout, dialect, model, sizes, dtypes; unknown families too."""
    from glmconv.cli.output import print_json
    from glmconv.commands.inspect import inspect
    from glmconv.source.source import SourceOptions

    wanted = match if match is not None else "*" if tensors else None
    options = SourceOptions(
        model_type=model_type,
        dialect=dialect,
        origin_hf_dir=origin_hf_dir,
        config_from_args=config_from_args,
    )
    report = inspect(path, options, wanted)
    if as_json:
        print_json(report.to_json())
    else:
        show(report, wanted)


def show(report: InspectReport, wanted: str | None = None) -> None:
    """The report as tables."""
    from glmconv.cli.output import facts, note, size, table

    model = report.model_type + (f" ({', '.join(report.titles)})" if report.titles else "")
    told = {"path": str(report.path), "layout": report.layout, "model": model, **report.facts}
    if report.defects:
        told["defects"] = f"{report.defects:,}: `glmconv check` lists them"
    facts("checkpoint", {name: value for name, value in told.items() if value})
    table(
        "dtypes",
        ("dtype", "tensors", "parameters", "size"),
        [(d.dtype, f"{d.tensors:,}", f"{d.parameters:,}", size(d.bytes)) for d in report.dtypes],
    )
    if report.model:
        facts("model", report.model)
    if report.evidence:
        said = [
            (
                one.name,
                one.said,
                one.held,
                "agrees" if one.agrees else f"CONTRADICTS {one.field}",
            )
            for one in report.evidence
        ]
        table("what the trainer wrote down", ("field", "says", "config.json", ""), said)
    if report.manifest is not None:
        shown = {name: str(report.manifest.get(name)) for name in _MANIFEST_SHOWN}
        facts("written by glmconv", shown)
    if wanted is not None:
        listed = [
            (one.name, one.dtype, str(one.shape), size(one.bytes), ", ".join(one.files))
            for one in report.tensors
        ]
        table(f"{len(listed):,} tensors", ("tensor", "dtype", "shape", "size", "file"), listed)
    if not report.understood:
        note(f"only the headers are understood: {report.why}")
