"""Where words go: results to stdout, progress and hints to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from glmconv.basics.printable import shown, shown_json

PLAIN_INTERVAL = 5.0
"""Seconds between two lines of progress where stderr is no terminal."""

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class Step(Protocol):
    """What long work tells of itself: bytes done and in all."""

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(shown_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)) + "\n")


def plain(value: object, style: str = "") -> Text:
    """Text as it is: no markup is read in it, and control characters are shown, not obeyed."""
    return Text(shown(str(value), lines=True), style=style)


def say(text: str, style: str = "") -> None:
    """A line on stdout."""
    out.print(plain(text, style))


def note(text: str) -> None:
    """A line on stderr."""
    err.print(plain(text))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout."""
    made = Table(title=plain(title), title_justify="left")
    for column in columns:
        made.add_column(plain(column))
    for row in rows:
        made.add_row(*(plain(cell) for cell in row))
    out.print(made)


def facts(title: str, values: Mapping[str, object]) -> None:
    """Names and values, one a line, on stdout."""
    made = Table(title=plain(title), title_justify="left", show_header=False)
    made.add_column(style="bold")
    made.add_column()
    for name, value in values.items():
        made.add_row(plain(name), plain(value))
    out.print(made)


def warn(text: str) -> None:
    """A warning on stderr."""
    err.print(plain("warning:", "yellow") + plain(f" {text}"))


def size(count: float) -> str:
    """Bytes for people: ``1.51 TB``, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    return ""


class _Plain:
    """Progress as plain lines, for logs."""

    def __init__(self, label: str) -> None:
        self.label, self.next = label, time.monotonic() + PLAIN_INTERVAL

    def __call__(self, step: Step) -> None:
        if time.monotonic() < self.next or not step.total:
            return
        self.next = time.monotonic() + PLAIN_INTERVAL
        share = 100 * step.done / step.total
        note(f"{self.label}: {size(step.done)} of {size(step.total)} ({share:.0f} %)")


class _Bar:
    def __init__(self, progress: Progress, label: str) -> None:
        self.progress, self.task = progress, progress.add_task(label, total=None)

    def __call__(self, step: Step) -> None:
        self.progress.update(self.task, completed=step.done, total=step.total)


@contextmanager
def progress_bar(label: str, quiet: bool) -> Iterator[Any]:
    """A callable that takes :class:`Step`: a bar on a terminal, plain lines elsewhere, or None."""
    if quiet:
        yield None
    elif err.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=err, transient=True) as progress:
            yield _Bar(progress, label)
    else:
        yield _Plain(label)
