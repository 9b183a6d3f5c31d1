"""``glmconv convert``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glmconv.basics.errors import Interrupted, UsageError
from glmconv.basics.sizes import parse_size

if TYPE_CHECKING:
    from glmconv.commands.conversion_report import Report
    from glmconv.engine import Stop

_MEGATRON_KINDS = {"hf": "hf", "megatron": "megatron", "core": "megatron", "mcore": "megatron"}


def command(
    src: Annotated[
        Path | None, typer.Argument(help="Checkpoint to read: an HF directory, a torch_dist root or unit.")
    ] = None,
    dst: Annotated[
        Path | None, typer.Argument(help="Where the result appears; not there before it is complete.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="megatron, hf or hf-stacked (default: the other kind).")
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            help="Names and order of a torch_dist that is written: mcore (>= 0.19), mcore-0.18, slime, miles."
        ),
    ] = None,
    from_dialect: Annotated[
        str | None, typer.Option(help="Dialect of the torch_dist that is read, where it cannot be told.")
    ] = None,
    model_type: Annotated[str | None, typer.Option(help="Checked against config.json.")] = None,
    origin_hf_dir: Annotated[
        Path | None, typer.Option(help="HF config and side files of a torch_dist that carries none.")
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
        typer.Option("--strict", help="Refuse a config that contradicts the trainer's args in anything."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", "--torch-dtype", help="Cast all but fp32-locked tensors: bfloat16, float16, float32."
        ),
    ] = None,
    layer_keys: Annotated[
        str | None, typer.Option(help="stacked or per-layer (default: the dialect's habit).")
    ] = None,
    padded_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of embedding and head in a torch_dist; zero past the vocabulary."),
    ] = None,
    iteration: Annotated[
        int | None, typer.Option(min=1, help="Write iter_NNNNNNN instead of release.")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Largest HF shard, e.g. 5GB (default: the origin's own shards, else 5GB)."),
    ] = None,
    fill_missing_from: Annotated[
        Path | None,
        typer.Option("--fill-missing-from", "-a", help="HF checkpoint to take missing tensors from."),
    ] = None,
    allow_missing: Annotated[
        list[str] | None, typer.Option(help="Exact HF name of a tensor that may be absent; repeatable.")
    ] = None,
    drop_mtp: Annotated[bool, typer.Option("--drop-mtp", help="Leave the MTP layers out.")] = False,
    workers: Annotated[int, typer.Option("-j", "--workers", min=1, help="Threads that move bytes.")] = 2,
    copy_mode: Annotated[str, typer.Option(help="auto, clone (share blocks or refuse) or copy.")] = "auto",
    hash_mode: Annotated[
        str, typer.Option("--hash", help="full, or none to read nothing that need not be read.")
    ] = "full",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, prove, print, write nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", "-f", help="Replace an existing unit once the new one is complete.")
    ] = False,
    set_tracker: Annotated[
        bool,
        typer.Option(
            "--set-tracker", help="Let the tracker name the new unit even where it names a newer one."
        ),
    ] = False,
    loader: Annotated[
        str | None, typer.Option(help="Megatron's name for the source kind: hf or megatron.")
    ] = None,
    saver: Annotated[str | None, typer.Option(help="Megatron's name for --to.")] = None,
    load_dir: Annotated[Path | None, typer.Option(help="Megatron's name for SRC.")] = None,
    save_dir: Annotated[Path | None, typer.Option(help="Megatron's name for DST.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="No progress.")] = False,
) -> None:
    """Convert a checkpoint between Hugging Face and Megatron torch_dist, streamed and proven.

    [bold]glmconv convert GLM-5.2/ out/ --to megatron[/bold]

    The form known from Megatron's tools is the same command:
    [bold]glmconv convert --loader hf --saver megatron --load-dir A --save-dir B[/bold]
    """
    src = _one("SRC", src, "--load-dir", load_dir)
    dst = _one("DST", dst, "--save-dir", save_dir)
    from glmconv.commands.convert import RunOptions, convert
    from glmconv.plan.planner import TargetOptions
    from glmconv.source.source import SourceOptions

    to = _target_kind(src, to, saver)
    if dialect is not None and from_dialect is None and to in ("hf", "hf-stacked"):
        # An export writes no dialect: the word can only mean the source's.
        from_dialect, dialect = dialect, None
    source = SourceOptions(
        model_type=model_type,
        dialect=from_dialect,
        origin_hf_dir=origin_hf_dir,
        fill_missing_from=fill_missing_from,
        allow_missing=frozenset(allow_missing or ()),
        drop_mtp=drop_mtp,
        config_from_args=config_from_args,
        strict=strict,
    )
    target = TargetOptions(
        to=to,
        dialect=dialect,
        layer_keys=layer_keys,
        padded_vocab=padded_vocab_size,
        iteration=iteration,
        max_shard_size=None if max_shard_size is None else parse_size("--max-shard-size", max_shard_size),
        dtype=dtype,
    )
    run = RunOptions(
        workers=workers,
        copy_mode=_choice("--copy-mode", copy_mode, ("auto", "clone", "copy")),
        hash_mode=_choice("--hash", hash_mode, ("full", "none")),
        overwrite=overwrite,
        set_tracker=set_tracker,
        dry_run=dry_run,
    )
    _check_loader(loader, src)
    from glmconv.cli.output import print_json, progress_bar
    from glmconv.cli.streams import done

    with _stoppable() as stop, progress_bar("converting", quiet or dry_run) as progress:
        report = convert(src, dst, source=source, target=target, run=run, progress=progress, stop=stop)
    if not dry_run:
        done(f"the result is published at {report.path}")
    if as_json:
        print_json(report.to_json())
    else:
        show(report)


def _one(name: str, positional: Path | None, flag: str, named: Path | None) -> Path:
    """The one path given as argument or as flag. Raises UsageError."""
    if positional is not None and named is not None:
        raise UsageError(f"{name} and {flag} are both given", hint="they mean the same: give one")
    path = positional if positional is not None else named
    if path is None:
        raise UsageError(f"{name} is missing", hint="glmconv convert SRC DST --to megatron")
    return path


def _kind(flag: str, value: str | None) -> str | None:
    if value is None:
        return None
    if value not in _MEGATRON_KINDS:
        raise UsageError(f"{flag} {value}: unknown", hint="hf or megatron")
    return _MEGATRON_KINDS[value]


def _target_kind(src: Path, to: str | None, saver: str | None) -> str | None:
    """What is to be written: said by one of two options, or the other kind than the source's."""
    said = _kind("--saver", saver)
    if to is not None and said is not None and not to.startswith(said):
        raise UsageError(f"--to {to} and --saver {saver} are both given", hint="they mean the same: give one")
    if to or said:
        return to or said
    from glmconv.source.open import kind_of

    return "hf" if kind_of(src) == "megatron" else "megatron"


def _check_loader(loader: str | None, src: Path) -> None:
    """``--loader`` must name what really lies at SRC."""
    kind = _kind("--loader", loader)
    if kind is None:
        return
    from glmconv.source.torchdist.location import detect_layout

    found = detect_layout(src)
    if found != kind:
        raise UsageError(
            f"--loader {loader}, but {src} holds a {found} checkpoint", hint="leave --loader away"
        )


def _choice(flag: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise UsageError(f"{flag} {value}: unknown", hint=f"one of {', '.join(allowed)}")
    return value


@contextmanager
def _stoppable() -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run cleanly; the journal stays and the same command resumes.

    While nothing is written yet the first signal ends the command where it stands. A second one
    always does: what is on disk is what a kill would leave.
    """
    from glmconv.engine import Stop

    stop = Stop()

    def request(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.request(number)
        if not stop.deferred:
            raise Interrupted(number, hint="nothing was written")

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(report: Report) -> None:
    """The report as tables."""
    from glmconv.cli.output import facts, size, table, warn

    ledger = report.ledger
    values: dict[str, object] = {
        "from": f"{report.source}  {report.from_layout}",
        "to": f"{report.path}  {report.to_layout}",
        "model": report.model_type,
        "ledger": f"{size(ledger.stored_bytes)} of tensors: {size(ledger.used_bytes)} used once, "
        f"{size(ledger.dropped_bytes)} dropped by name; every byte of {ledger.chunks:,} chunks written once",
        "files": f"{report.files:,} files, {size(ledger.target_bytes)}",
        "plan": f"{report.plan_digest} in {report.plan_seconds:.1f} s",
    }
    if report.config is not None:
        values["config"] = str(report.config)
    if report.filled:
        values["filled"] = f"{len(report.filled):,} tensors, each named in the manifest with its file"
    if ledger.zero_bytes:
        values["padding"] = f"{size(ledger.zero_bytes)} of zero rows"
    if ledger.repeated_bytes:
        values["duplicates"] = f"{size(ledger.repeated_bytes)} written again, as the origin has them"
    if report.widened:
        labels = ", ".join(sorted(set(report.widened.values())))
        values["widened"] = f"{len(report.widened)} tensors from {labels} (exact)"
    values |= _work(report)
    values["memory"] = f"{size(report.peak_rss_anon)} at most"
    facts("plan" if report.outcome is None else "converted", values)
    if report.dropped:
        rows = [(name, reason, size(count)) for name, reason, count in report.dropped[:20]]
        if len(report.dropped) > len(rows):
            rows.append((f"… {len(report.dropped) - len(rows)} more", "--json lists all", ""))
        table("dropped", ("tensor", "reason", "size"), rows)
    for warning in report.warnings:
        warn(str(warning))


def _work(report: Report) -> dict[str, object]:
    """What was done, and how fast."""
    from glmconv.cli.output import size

    outcome, values = report.outcome, dict[str, object]()
    if report.finished_earlier:
        values["earlier run"] = "had published this unit; what it left undone is done now"
    elif outcome is None:
        values["dry run"] = "nothing was written"
        values["not looked at"] = ", ".join(report.not_looked_at)
    else:
        values["bytes"] = ", ".join(f"{name} {size(count)}" for name, count in report.steps.items() if count)
        if outcome.clone_reason and outcome.copy_mode == "auto":
            values["not cloned"] = outcome.clone_reason
        values["hashes"] = "none asked for" if outcome.hash_mode == "none" else "of every payload"
        if outcome.bytes_reread:
            values["hashes"] = (
                f"of every payload; {size(outcome.bytes_reread)} were read for them alone, "
                f"{outcome.reread_seconds:.1f} s of the workers' time (--hash none skips that)"
            )
        rate = report.ledger.target_bytes / report.seconds if report.seconds else 0.0
        values["time"] = f"{report.seconds:.1f} s, {size(rate)}/s"
    return values
