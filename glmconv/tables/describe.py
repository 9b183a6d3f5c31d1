"""Tables as plain data, for people and other programs."""

from __future__ import annotations

from typing import Any

from glmconv.tables.expand import overlaid
from glmconv.tables.rules import Rule, Table


def describe(table: Table, dialect: str) -> list[dict[str, Any]]:
    """One entry for each rule of a dialect, then drops and duplicates.

    ``stored``, ``transform``, ``hf`` (names with their shapes), ``when``, ``dialect_only``.
    """
    overlay = table.overlays.get(dialect, ())
    entries = [_rule(rule, rule in overlay) for rule in overlaid(table.rules, overlay)]
    for drop in table.drops:
        entries.append(_entry("(dropped)", drop.reason, [drop.name], drop.when))
    for tied in table.tied:
        entries.append(_entry("(duplicate)", f"repeats {tied.to}", [tied.name], tied.when))
    return entries


def _rule(rule: Rule, own: bool) -> dict[str, Any]:
    names = []
    for slot, hf in rule.via.slots().items():
        shape = ", ".join(dim.name for dim in hf.dims)
        lock = f" kept {hf.lock.label}" if hf.lock else ""
        label = "" if slot == "tensor" else f"{slot}="
        names.append(f"{label}{hf.name} [{shape}]{lock}")
    return _entry(rule.stored, type(rule.via).__name__, names, rule.when, own)


def _entry(stored: str, transform: str, names: list[str], when: Any, own: bool = False) -> dict[str, Any]:
    return {
        "stored": stored,
        "transform": transform,
        "hf": names,
        "when": ", ".join(condition.name for condition in when),
        "dialect_only": own,
    }
