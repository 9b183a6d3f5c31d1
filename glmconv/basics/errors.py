"""Every failure that a user can meet, with the exit code it ends in.

An error says what is wrong, where (file, tensor, rule, shapes) and what to try.
Exit codes: 1 the data is wrong, 2 usage, 3 input or output, 4 parity failed,
130/143 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glmconv.basics.printable import shown

SHOWN_DEFECTS = 20


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is wrong with a checkpoint, a config or a plan.

    ``kind`` is a short stable slug (``missing``, ``unexpected``, ``shape`` …) that scripts may
    match; ``where`` names file, tensor or rule; ``severity`` is ``error`` or ``warning``.
    """

    kind: str
    what: str
    where: str = ""
    hint: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f" ({self.hint})" if self.hint else ""
        return shown(f"{place}{self.what}{hint}")


class GlmconvError(Exception):
    """Base of all errors that glmconv raises on purpose; ``exit_code`` is the process's status."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        defects: Sequence[Defect] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.defects = tuple(defects)

    def __str__(self) -> str:
        lines = [shown(f"{self.where}: {self.what}" if self.where else self.what)]
        lines += [f"  - {defect}" for defect in self.defects[:SHOWN_DEFECTS]]
        if len(self.defects) > SHOWN_DEFECTS:
            lines.append(f"  … and {len(self.defects) - SHOWN_DEFECTS} more")
        if self.hint:
            lines.append(shown(f"try: {self.hint}"))
        return "\n".join(lines)


class DataError(GlmconvError):
    """The checkpoint or its config is wrong, or in a form that the tables do not handle."""

    exit_code = 1


class UsageError(GlmconvError):
    """The arguments cannot mean anything, or an optional package is missing."""

    exit_code = 2


class StorageError(GlmconvError):
    """Missing path, permission, space, busy destination, device error."""

    exit_code = 3

    def __init__(self, what: str, *, where: str = "", hint: str = "", defects: Sequence[Defect] = ()) -> None:
        hint = hint or "look at the path and its filesystem, then run the same command again"
        super().__init__(what, where=where, hint=hint, defects=defects)


class ParityError(GlmconvError):
    """Both models ran and do not compute the same."""

    exit_code = 4


class Interrupted(GlmconvError):
    """Stopped by a signal; the journal is kept and the same command resumes."""

    def __init__(self, signal_number: int, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"interrupted by signal {signal_number}", where=where, hint=hint)
        self.exit_code = 128 + signal_number
