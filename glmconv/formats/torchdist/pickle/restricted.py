"""A pickle reader that cannot run anything.

Checkpoints carry pickles (``.metadata``, ``common.pt``, the head of each record), and Python's own
reader calls whatever a pickle names. This one has no call in it: it interprets the opcodes that
Python 3's picklers emit and builds plain values, and a :class:`Node` for each object that the
pickle describes. Names are only ever compared, never imported.

Every fault ends in :class:`~glmconv.basics.errors.DataError`. Work and memory are linear in the bytes
read, and nothing here recurses, whatever the nesting.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from glmconv.basics.errors import DataError
from glmconv.formats.torchdist.pickle.machine import (
    Global,
    Machine,
    NeedsAll,
    Node,
    Persistent,
    Policy,
    Refused,
)
from glmconv.formats.torchdist.pickle.opcodes import TABLE

__all__ = ["Global", "Node", "Persistent", "Policy", "loads"]


def loads(data: bytes, where: str, policy: Policy) -> Any:
    """Value of a pickle: None, bool, int, float, str, bytes, list, dict, tuple, Global, Node, Persistent.

    Containers may hold themselves and may be nested deeply: whoever walks them must bound the walk.
    Raises :class:`DataError` naming ``where``, the byte and the fault.
    """
    machine = Machine(data, policy)
    try:
        return machine.run(TABLE)
    except NeedsAll:
        return loads(data, where, replace(policy, shortcuts={}))
    except Refused as fault:
        what = str(fault)
    except IndexError:
        what = "it is cut short or takes values that it never made"
    except (struct.error, UnicodeError):
        what = "it holds a broken number or text"
    raise DataError(
        f"refused to read the pickle: at byte {min(machine.pos, len(data))} of {len(data)}, {what}",
        where=where,
        hint="save the checkpoint anew if it is yours; do not load it with other tools if it is not",
    )
