"""Sizes as people write them on a command line."""

from __future__ import annotations

import re

from glmconv.basics.errors import UsageError

UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_size(flag: str, text: str) -> int:
    """Bytes of ``8GB`` (powers of 1000), ``2GiB`` (powers of 1024) or a number. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if not found or found[2].upper() not in UNITS:
        raise UsageError(f"{flag} {text}: not a size", hint="for instance 8GB or 500MB")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size < 1:
        raise UsageError(f"{flag} {text}: must be positive")
    return size
