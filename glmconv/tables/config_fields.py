"""Typed fields of a raw ``config.json``: all defects collected, every key accounted for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from glmconv.basics.abbreviated import brief
from glmconv.basics.errors import DataError, Defect
from glmconv.tables.config_keys import FORWARD, NESTED, Neutral, is_inert, is_neutral

MAX_SIZE = (1 << 40) - 1

UNREAD = "config-unread"
"""Kind of a remark on a key that nothing here reads."""
CHANGES_FORWARD = "config-forward"
"""Kind of a remark on a key whose value changes the forward pass and is not carried to Megatron."""


class Fields:
    """Typed access to a config; every key that is asked for counts as read.

    ``inert`` are a family's own keys without a part in the forward pass, each with the reason;
    ``neutral`` its own keys that have one unless they hold a neutral value.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        inert: Mapping[str, str] | None = None,
        neutral: Mapping[str, Neutral] | None = None,
    ) -> None:
        self.config = config
        self.inert = dict(inert or {})
        self.neutral = {**FORWARD, **(neutral or {})}
        self.defects: list[Defect] = []
        self._read: set[str] = set()
        self._remarks: list[Defect] = []

    def problem(self, what: str, field: str, hint: str = "") -> None:
        """Note a defect of ``field``."""
        self.defects.append(Defect("config", what, f"config.json: {field}", hint))

    def changes_forward(self, field: str, value: Any, what: str) -> None:
        """Note that ``value`` of ``field`` changes the forward pass in a way that is not carried."""
        self._remark(CHANGES_FORWARD, field, value, f"changes the forward pass: {what}")

    def _remark(self, kind: str, field: str, value: Any, what: str) -> None:
        named = f'config key "{brief(field)[1:-1]}" (= {brief(value)}) {what}'
        self._remarks.append(Defect(kind, named, "config.json", severity="warning"))

    def get(self, field: str) -> Any:
        """The raw value, None where it is absent or null."""
        self._read.add(field)
        return self.config.get(field)

    def has(self, field: str) -> bool:
        return self.get(field) is not None

    def natural(self, *fields: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer from ``least`` to ``most``; where several of ``fields`` are set they must agree."""
        given = {field: self.config[field] for field in fields if self.has(field)}
        if not given:
            if default is None:
                self.problem("missing", " or ".join(fields))
                return least
            return default
        for field, value in given.items():
            if type(value) is not int or not least <= value <= most:
                self.problem(f"must be an integer from {least} to {most}, is {brief(value)}", field)
                return least
        if len(set(given.values())) > 1:
            self.problem(f"fields contradict each other: {given}", " and ".join(given))
        return int(next(iter(given.values())))

    def number(self, field: str, default: float | None = None, *, positive: bool = False) -> float:
        """A finite number."""
        value = self.get(field)
        if value is None and default is not None:
            return default
        number = finite(value)
        if number is None or (positive and number <= 0):
            what = "positive number" if positive else "number"
            self.problem("missing" if value is None else f"must be a {what}, is {brief(value)}", field)
            return default or 1.0
        return number

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(f"must be true or false, is {brief(value)}", field)
            return default
        return value

    def words(self, field: str, length: int, allowed: Iterable[str]) -> list[str] | None:
        """A list of ``length`` words, or None where the field is absent."""
        value = self.get(field)
        if value is None:
            return None
        known = set(allowed)
        if not isinstance(value, list) or not all(isinstance(word, str) and word in known for word in value):
            self.problem(f"must be a list of {sorted(known)}", field)
            return None
        if len(value) != length:
            self.problem(f"has {len(value)} entries for {length} layers", field)
            return None
        return value

    def alike(self, field: str, allowed: Iterable[str], otherwise: str) -> None:
        """A list of words, one a layer, that changes nothing while all are ``allowed``."""
        value, known = self.get(field), set(allowed)
        if value is None or (
            isinstance(value, list) and all(isinstance(w, str) and w in known for w in value)
        ):
            return
        self.changes_forward(field, value, otherwise)

    def divides(self, whole: int, part: int, what: str) -> None:
        if part and whole % part:
            self.problem(f"{whole} is not a multiple of {part}", what)

    def finish(self) -> None:
        """Raise DataError listing every defect noted so far."""
        if self.defects:
            raise DataError(
                "config.json cannot be understood",
                defects=self.defects,
                hint="compare with the released config of this model",
            )

    def remarks(self) -> tuple[Defect, ...]:
        """What the file says beyond the fields read so far, as warnings by name; call it last.

        Kinds are ``CHANGES_FORWARD`` and ``UNREAD``. A null says nothing, an inert key neither.
        """
        for key, value in self.config.items():
            if key in self._read:
                continue
            if key in NESTED and isinstance(value, dict):
                for inner, nested in value.items():
                    if inner not in self.config or self.config[inner] != nested:
                        self._judge(f"{key}.{inner}", inner, nested)
            else:
                self._judge(key, key, value)
        return tuple(self._remarks)

    def _judge(self, name: str, key: str, value: Any) -> None:
        """Note an unread key, unless it is inert, or holds what leaves the forward pass alone."""
        neutral = self.neutral.get(key)
        if value is None or key in self.inert or is_inert(key):
            return
        if neutral is None:
            what = "if it changes what the model computes, the Megatron model lacks that"
            self._remark(UNREAD, name, value, f"is not read by anything here: {what}")
        elif not is_neutral(value, neutral):
            if neutral.training:
                self._remark(UNREAD, name, value, f"is not carried: {neutral.otherwise}")
            else:
                self.changes_forward(name, value, neutral.otherwise)


def finite(value: Any) -> float | None:
    """The number as a float, or None where it is none, or none that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
