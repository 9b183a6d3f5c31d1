"""The one fast hash of glmconv: xxh3 with 128 bits, as lower-case hexadecimal."""

from __future__ import annotations

import xxhash


def digest_bytes(data: bytes) -> str:
    """xxh3_128 of ``data``. Guards against mistakes and bad disks, not against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)
