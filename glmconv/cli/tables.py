"""``glmconv tables``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from glmconv.basics.errors import UsageError


def command(
    family: Annotated[
        str | None, typer.Argument(help="model_type; without it all families are listed.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table, json or markdown.")] = "table",
    dialect: Annotated[str, typer.Option(help="mcore, mcore-0.18, slime or miles.")] = "mcore",
) -> None:
    """Show which Hugging Face tensors make up which Megatron tensor, and how."""
    from glmconv.cli.output import print_json, table
    from glmconv.tables.describe import describe
    from glmconv.tables.registry import FAMILIES, get_bridge
    from glmconv.tables.rules import DIALECTS

    if form not in ("table", "json", "markdown"):
        raise UsageError(f"--format {form}: unknown", hint="table, json or markdown")
    if dialect not in DIALECTS:
        raise UsageError(f"--dialect {dialect}: unknown", hint=", ".join(DIALECTS))
    if family is None:
        rows = [(name, ", ".join(get_bridge(name).titles)) for name in FAMILIES]
        _show(form, "families", ("model_type", "models"), rows, print_json, table)
        return
    rows_of_family = [
        (row["stored"], row["transform"], "\n".join(row["hf"]), row["when"])
        for row in describe(get_bridge(family).table, dialect)
    ]
    title = f"{family} in dialect {dialect}"
    _show(form, title, ("Megatron", "transform", "Hugging Face", "when"), rows_of_family, print_json, table)


def _show(
    form: str, title: str, columns: tuple[str, ...], rows: list[Any], as_json: Any, as_table: Any
) -> None:
    if form == "json":
        as_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif form == "markdown":
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = (f"`{cell}`" if "{" in cell or "." in cell else cell for cell in row)
            lines.append("| " + " | ".join(cell.replace("\n", "`<br>`") for cell in cells) + " |")
        typer.echo(f"# {title}\n\n" + "\n".join(lines))
    else:
        as_table(title, columns, rows)
