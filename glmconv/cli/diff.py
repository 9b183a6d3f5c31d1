"""``glmconv diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from glmconv.commands.diff import DiffReport
    from glmconv.values.differences import Difference

SHOWN = 40
"""Tensors that are printed; ``--all`` and ``--json`` have all."""


def command(
    a: Annotated[Path, typer.Argument(help="A checkpoint: HF directory, torch_dist root or iteration.")],
    b: Annotated[Path, typer.Argument(help="Another, of any layout.")],
    origin_hf_dir: Annotated[
        Path | None,
        typer.Option(help="HF config for sides that carry none; or for one: --a-…, --b-…"),
    ] = None,
    a_origin_hf_dir: Annotated[Path | None, typer.Option(help="HF config for A.")] = None,
    b_origin_hf_dir: Annotated[Path | None, typer.Option(help="HF config for B.")] = None,
    a_dialect: Annotated[str | None, typer.Option(help="Dialect of A, where it cannot be told.")] = None,
    b_dialect: Annotated[str | None, typer.Option(help="Dialect of B, where it cannot be told.")] = None,
    drop_mtp: Annotated[bool, typer.Option("--drop-mtp", help="Compare without the MTP layers.")] = False,
    workers: Annotated[int, typer.Option("-j", "--workers", min=1, help="Threads that read.")] = 2,
    show_all: Annotated[bool, typer.Option("--all", help="Print every tensor that differs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="No progress.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor, across layouts; exit 0 where equal, 1 where not."""
    from glmconv.cli.output import print_json, progress_bar
    from glmconv.commands.diff import DiffOptions, diff
    from glmconv.source.source import SourceOptions

    options = DiffOptions(
        a=SourceOptions(dialect=a_dialect, origin_hf_dir=a_origin_hf_dir or origin_hf_dir, drop_mtp=drop_mtp),
        b=SourceOptions(dialect=b_dialect, origin_hf_dir=b_origin_hf_dir or origin_hf_dir, drop_mtp=drop_mtp),
        workers=workers,
    )
    with progress_bar("comparing", quiet) as progress:
        report = diff(a, b, options, progress)
    if as_json:
        print_json(report.to_json())
    else:
        show(report, None if show_all else SHOWN)
    raise typer.Exit(report.exit_code)


def show(report: DiffReport, limit: int | None = SHOWN) -> None:
    """The report as tables; the verdict stands last."""
    from glmconv.cli.output import facts, note, say, size, table
    from glmconv.values.differences import STATUSES

    facts(
        "compared",
        {
            "A": f"{report.a}  {report.layouts[0]}",
            "B": f"{report.b}  {report.layouts[1]}",
            "model": " and ".join(dict.fromkeys(report.model_types)),
            **{status: f"{report.count(status):,}" for status in STATUSES if report.count(status)},
        },
    )
    odd = [one for one in report.tensors if one.status != "equal"]
    rows = [_row(one) for one in odd[:limit]]
    if len(odd) > len(rows):
        rows.append((f"… {len(odd) - len(rows):,} more", "--all prints them", "", "", "", ""))
    if rows:
        table("not the same", ("tensor", "is", "dtype", "differ", "max abs", "first"), rows)
    for name, defects in (("A", report.defects_a), ("B", report.defects_b)):
        for defect in defects:
            say(f"{name} is not sound: {defect}")
    for line in report.config:
        note(f"config.json: {line}")
    verdict = "the same tensors with the same values" if report.equal else "they differ"
    say(f"{verdict} ({size(report.bytes_read)} read in {report.seconds:.1f} s)")


def _row(one: Difference) -> tuple[str, ...]:

    left, right = one.dtypes
    dtype = left if left == right else f"{left or '-'} / {right or '-'}"
    if one.status == "shape":
        return (one.name, one.status, dtype, f"{one.shapes[0]} / {one.shapes[1]}", "", "")
    if one.status in ("missing", "extra", "not-held"):
        return (one.name, f"{one.status}: {one.note}", dtype, "", "", "")
    apart = "not a number" if one.max_abs is None else f"{one.max_abs:.6g}"
    first = "" if one.first is None else str(list(one.first))
    return (one.name, one.status, dtype, f"{one.count:,} of {one.elements:,}", apart, first)
