"""``glmconv verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glmconv.basics.errors import StorageError, UsageError

if TYPE_CHECKING:
    from glmconv.verify.faults.selftest import SelfTestReport
    from glmconv.verify.measure.report import VerifyReport


def command(
    hf_dir: Annotated[Path, typer.Argument(help="The Hugging Face directory.")],
    megatron_dir: Annotated[Path, typer.Argument(help="A torch_dist root or one iteration of it.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="fp32 proves weights; bf16 is held against its noise floor.")
    ] = "fp32",
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token ids: a JSON list, or a list of lists.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text for the tokenizer of HF_DIR.")
    ] = None,
    random: Annotated[
        int | None, typer.Option(metavar="N", help="N sequences of random tokens (default: 1).")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens a sequence (default: twice the top-k of an indexer, else 128)."),
    ] = None,
    index_topk: Annotated[
        int | None,
        typer.Option(help="Lower an indexer's top-k on both sides, so that a short text selects sparsely."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="A:B", help="Run layers A to B-1 alone, without the head.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="On the CPU: stop above this, beyond what the imports take (8GB).")
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Apply every known fault to the Megatron side: is each one seen?"),
    ] = False,
    dialect: Annotated[
        str | None, typer.Option(help="Dialect of the torch_dist, where it cannot be told.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write one self-contained page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="No progress.")] = False,
) -> None:
    """Run both real models on the same tokens, layer by layer, and compare.

    Exit 0 where they compute the same, 4 where not, 2 where nothing was proven (an indexer that
    never had to choose).
    """
    from glmconv.basics.sizes import parse_size
    from glmconv.cli.output import print_json, progress_bar, warn
    from glmconv.verify.options import VerifyOptions, parse_layers
    from glmconv.verify.pair import require_packages

    options = VerifyOptions(
        device=device,
        precision=precision,
        tokens=tokens,
        prompt=prompt,
        random=random,
        seq_len=seq_len,
        index_topk=index_topk,
        layers=None if layers is None else parse_layers(layers),
        max_memory=None if max_memory is None else parse_size("--max-memory", max_memory),
        dialect=dialect,
    )
    options.check()
    if self_test and (layers is not None or report is not None):
        raise UsageError("--self-test goes through all layers and has no page", hint="--json has everything")
    require_packages()
    with progress_bar("testing" if self_test else "running both models", quiet) as progress:
        if self_test:
            from glmconv.verify.faults.selftest import self_test as run_self_test

            tested = run_self_test(hf_dir, megatron_dir, options, progress)
        else:
            from glmconv.verify.run import verify

            found = verify(hf_dir, megatron_dir, options, progress, warn)
    if self_test:
        if as_json:
            print_json(tested.to_json())
        else:
            show_self_test(tested)
        raise typer.Exit(tested.exit_code)
    if report is not None:
        _write_page(found, report)
    if as_json:
        print_json(found.to_json())
    else:
        show(found)
    raise typer.Exit(found.exit_code)


def _write_page(found: VerifyReport, path: Path) -> None:
    from glmconv.verify.page.html import page

    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the page: {error.strerror}", where=str(path)) from error


def show(report: VerifyReport) -> None:
    """The report as tables; the verdict stands last."""
    from glmconv.cli.output import facts, say, table
    from glmconv.verify.page.html import facts as told
    from glmconv.verify.page.html import runtime_line

    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    facts("verify", {**told(report), "versions": versions})
    head, places = _filled_columns(report)
    table("worst token's error of hidden states, and choices that agree", head, places)
    rows = []
    for one in report.predictions:
        for name, parity in ((one.name, one.parity), ("  noise floor", one.floor)):
            if parity is not None:
                rows.append(
                    (
                        name,
                        f"{parity.max_abs:.2g}",
                        f"{parity.p99_abs:.2g}",
                        f"{parity.mean_abs:.2g}",
                        f"{parity.kl_hf_megatron:.0e} / {parity.kl_megatron_hf:.0e}",
                        f"{parity.argmax_agreement:.2%}",
                    )
                )
    if rows:
        table("predictions", ("", "max |Δ|", "p99 |Δ|", "mean |Δ|", "KL both ways", "argmax"), rows)
    for line in report.alignments:
        say(f"aligned: {line}")
    runtime = runtime_line(report)
    if runtime:
        say(runtime, "red")
    for name, problems in report.problems.items():
        for problem in problems:
            say(f"{name}: {problem}", "red")
    colour = {0: "green", 4: "red"}.get(report.exit_code, "yellow")
    say(f"{report.verdict}: {report.reason}", colour)


def _filled_columns(report: VerifyReport) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the stages, without columns that nothing stands in; 80 columns wide in fp32."""
    from glmconv.verify.page.html import number, place_row

    head = ["stage", "error", "running", "floor", "aside", "1 - r", "top-k", "experts", "s"]
    rows = []
    for place in report.places:
        name, kind, *figures, _problems = place_row(place)
        pearson = None if place.selection is None else place.selection.pearson
        # A correlation of 0.99999… takes too much room.
        figures[4] = "" if pearson is None else number(1 - pearson)
        rows.append([f"{name} {kind.replace(',', '').replace('shares index', 'shared')}".strip(), *figures])
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def show_self_test(report: SelfTestReport) -> None:
    """One row a fault."""
    from glmconv.cli.output import say, table

    rows = []
    for fault in report.faults:
        first = next(iter(fault.caught.values()), [""])[0]
        verdict = "caught" if not fault.missed else f"MISSED at {', '.join(fault.missed)}"
        rows.append((fault.name, fault.description, ", ".join(fault.changed), verdict, first))
    table(f"faults in {report.model_type}", ("fault", "what it does", "where", "seen", "as"), rows)
    if report.not_applicable:
        say(f"nothing to break in this model: {', '.join(report.not_applicable)}")
    caught = sum(not fault.missed for fault in report.faults)
    verdict = f"{caught} of {len(report.faults)} faults are caught, each where it is"
    say(f"{verdict} (megatron-core {report.megatron_core}, {report.seconds:.1f} s)")
