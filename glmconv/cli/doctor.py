"""``glmconv doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[
        Path | None, typer.Argument(help="Also say whether files can share blocks there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say what is installed, what each package enables, and what this machine offers."""
    from glmconv.cli.output import facts, print_json, table
    from glmconv.commands.doctor import examine

    report = examine(path)
    if as_json:
        print_json(report)
        return
    rows = [
        (p["name"], p["version"] or "not installed", p["enables"], p["install"]) for p in report["packages"]
    ]
    table("packages", ("package", "version", "enables", "to install"), rows)
    facts("machine", report["machine"])
    if report["path"]:
        facts("path", report["path"])
