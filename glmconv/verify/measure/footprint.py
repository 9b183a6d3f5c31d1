"""Memory that a verification takes, watched while it runs."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from types import TracebackType

import torch

from glmconv.basics.errors import StorageError
from glmconv.basics.memory import rss_anon

INTERVAL = 0.01
"""Seconds between two looks."""


class Footprint:
    """Watches this process's anonymous memory beyond what it had on entry; a context manager.

    ``already`` are bytes taken before that count as well. ``check`` raises StorageError once the
    limit was passed.
    """

    def __init__(self, limit: int | None, already: int = 0) -> None:
        self.limit, self.already = limit, already
        self.start = self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Footprint:
        # What is there now stays: the collector need not look at it again with every layer.
        gc.collect()
        gc.freeze()
        self.start = rss_anon() - self.already
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        gc.unfreeze()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak = max(self.peak, rss_anon() - self.start)

    def release(self) -> None:
        """Give what was dropped back to the system, so that the next layer starts from the same."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def check(self, place: str) -> None:
        """Raise StorageError where the peak so far is above the limit."""
        if self.limit is not None and self.peak > self.limit:
            raise StorageError(
                f"took {self.peak / 1e6:,.0f} MB at {place}, --max-memory allows {self.limit / 1e6:,.0f} MB",
                hint="fewer tokens (--seq-len), or a larger --max-memory",
            )
