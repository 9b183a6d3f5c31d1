"""The command line. Heavy imports happen inside commands, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from glmconv.basics.errors import GlmconvError
from glmconv.basics.version import __version__
from glmconv.cli import streams

app = typer.Typer(
    name="glmconv",
    help="Move checkpoints between Hugging Face safetensors and Megatron torch_dist, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 the data is wrong, 2 usage, 3 input or output, 4 parity failed, "
    "130/143 interrupted (the same command resumes), 141 the reader of stdout left.",
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"glmconv {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Move checkpoints between Hugging Face safetensors and Megatron torch_dist, and prove it."""


def _register() -> None:
    from glmconv.cli import check, convert, diff, doctor, inspect, tables, verify

    for name, module in (
        ("convert", convert),
        ("check", check),
        ("verify", verify),
        ("diff", diff),
        ("inspect", inspect),
        ("tables", tables),
        ("doctor", doctor),
    ):
        needs_paths = name in ("convert", "check", "verify", "diff", "inspect")
        app.command(name, no_args_is_help=needs_paths)(module.command)


def main() -> None:
    """Run the command line; every GlmconvError ends in its exit code and one message on stderr.

    A report that nobody could read ends in a code of its own, unless the command itself failed:
    what it says of the data is not overturned.
    """
    with streams.lasting() as out:
        _register()
        code = _run()
        lost = streams.report_lost(out)
        if lost is not None:
            if lost.exit_code != streams.READER_LEFT or out.done:  # nobody misses what `head` did not want
                sys.stderr.write(f"glmconv: {lost}\n")
            code = code or lost.exit_code
    sys.exit(code)


def _run() -> int:
    """The exit code of the command."""
    try:
        app()
    except GlmconvError as error:
        if os.environ.get("GLMCONV_DEBUG"):
            raise
        sys.stderr.write(f"glmconv: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("glmconv: interrupted\n")
        return 130
    except SystemExit as ended:  # how typer ends every command
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
