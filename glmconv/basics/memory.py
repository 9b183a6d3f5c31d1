"""Memory that this process holds for itself (the page cache does not count)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cycle collector while a plan is made.

    A big model's plan is a million small objects without cycles; looking through them again and
    again takes longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rss_anon(pid: str = "self") -> int:
    """Bytes of anonymous memory of a process now (``RssAnon`` of ``/proc``); 0 where unknown."""
    return _field(pid, "RssAnon:")


def peak_rss_anon() -> int:
    """Upper bound of this process's anonymous memory, in bytes.

    The kernel keeps a peak only of all resident memory (``VmHWM``); mapped files (libraries) are
    taken off as they stand now.
    """
    mapped = _field("self", "RssFile:") + _field("self", "RssShmem:")
    return max(rss_anon(), _field("self", "VmHWM:") - mapped)


def _field(pid: str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0
