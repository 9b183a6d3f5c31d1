"""Text that came from files, made safe to show: nothing in it reaches a terminal as a command."""

from __future__ import annotations

import re

_CONTROLS = (
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: escape sequences, bells, overwritten lines
    "\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"  # invisible, or turning the direction around
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # bytes of a file name that are no Unicode
)
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_IN_LINES = re.compile(f"(?!\n)[{_CONTROLS}]")


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(text: str, *, lines: bool = False) -> str:
    """``text`` with control characters as ``\\x1b``, ``\\u202e`` …; ``lines`` keeps line breaks."""
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(_escaped, text)


def shown_json(text: str) -> str:
    """JSON with the same characters as JSON's own escapes: the same document, safe on a terminal."""
    return _UNSAFE_IN_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
