"""A value found in a file, short enough for a message whatever it holds."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def brief(value: Any) -> str:
    """``repr`` with long texts, numbers and containers cut; nesting is followed a few levels only."""
    return _SHORT.repr(value)
