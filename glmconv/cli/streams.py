"""Standard output and standard error that may be full, closed, or read by nobody.

A report that cannot be written must neither cut a command short nor pass in silence: both streams
keep their first failure and take all that follows without a word; :func:`report_lost` tells it at the end.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from glmconv.basics.errors import StorageError

READER_LEFT = 141
"""Exit code where the reader of stdout closed it, as after ``| head``: 128 + SIGPIPE, as shells show it."""


class Stream(io.TextIOBase):
    """A text stream whose writes never raise. ``failure`` is the first error of the stream beneath.

    ``beneath`` is None where the process was started with that descriptor closed. ``done`` is what
    stands whatever becomes of the words, for the message about their loss.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, beneath: TextIO | None) -> None:
        self._beneath = beneath
        self.failure: OSError | None = None
        self.done = ""
        if beneath is not None:
            self.encoding = beneath.encoding or self.encoding
        if isinstance(beneath, io.TextIOWrapper):
            # Names of files need not be Unicode; showing one must not end the command.
            beneath.reconfigure(errors=self.errors)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._beneath is not None and self._beneath.isatty()

    def fileno(self) -> int:
        if self._beneath is None:
            raise io.UnsupportedOperation("the descriptor is closed")
        return self._beneath.fileno()

    def write(self, text: str) -> int:
        if self._beneath is None and self.failure is None:
            self.failure = OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._beneath is not None and self.failure is None:
            try:
                self._beneath.write(text)
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        if self._beneath is not None and self.failure is None:
            try:
                self._beneath.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Keep the error. What the stream beneath still holds goes nowhere when it is flushed at exit."""
        self.failure = error
        if self._beneath is not None:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._beneath.fileno())
                os.close(nowhere)


@contextmanager
def lasting() -> Iterator[Stream]:
    """Have both streams in place of ``sys``'s own; gives that of stdout."""
    _occupy_closed_descriptors()
    before = sys.stdout, sys.stderr
    out = Stream(sys.stdout)
    sys.stdout, sys.stderr = out, Stream(sys.stderr)
    try:
        yield out
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _occupy_closed_descriptors() -> None:
    """Files opened later must not get number 0, 1 or 2: what a library prints would go into a checkpoint."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def done(what: str) -> None:
    """Say what stands even where the report on stdout is lost."""
    if isinstance(sys.stdout, Stream):
        sys.stdout.done = what


def report_lost(out: Stream) -> StorageError | None:
    """Flush stdout; the error of what could not be written, with its exit code, else None.

    Unix tools that write to a pipe without a reader end by SIGPIPE, which says nothing of their data
    and is no failure of theirs: that gets a code of its own.
    """
    out.flush()
    if out.failure is None:
        return None
    lost = f"could not be written to stdout: {os.strerror(out.failure.errno or errno.EIO)}"
    if out.done:
        error = StorageError(
            f"{out.done}; its report {lost}", hint="glmconv inspect shows it; nothing has to be done again"
        )
    else:
        error = StorageError(f"the report {lost}", hint="run it again with its output sent to another place")
    if out.failure.errno == errno.EPIPE:
        error.exit_code = READER_LEFT
    return error
