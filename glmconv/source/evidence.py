"""What a checkpoint says about itself, compared with the config that steers its conversion.

A contradicted claim that moves rows or counts is a defect of the source; one that changes the forward
pass alone a warning, and with ``strict`` a defect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from glmconv.basics.abbreviated import brief
from glmconv.basics.errors import Defect
from glmconv.source.evidence_claims import CLAIMS
from glmconv.tables.spec import ModelSpec
from glmconv.tables.trainer_fields import Fields

KIND = "evidence"
"""Kind of the defects and warnings that come from here."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One claim beside the config. ``where`` names the file."""

    name: str
    said: str
    field: str
    held: str
    agrees: bool
    moves: bool
    where: str


def compare(sources: Iterable[Fields], spec: ModelSpec) -> list[Compared]:
    """Every claim that each of the sources makes about itself, beside the spec."""
    found = []
    for fields in sources:
        for claim in CLAIMS:
            said, held = claim.said(fields), claim.held(spec)
            if said is not None and held is not None:
                agrees = claim.agrees(said, held)
                name = fields.name(*claim.names)
                words = _words(said, held), _words(held, said)
                found.append(
                    Compared(name, words[0], claim.field, words[1], agrees, claim.moves, fields.where)
                )
    return found


def _words(value: Any, other: Any) -> str:
    """A value for people; of a pattern over layers, what matters beside the other one."""
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return value[0] if value[0] == "none" else f"{value[0]} by {value[1]:g}"
    if isinstance(value, tuple):
        layers = [i for i, one in enumerate(value) if i >= len(other) or one != other[i]]
        yes = sum(value)
        odd = f", layer {layers[0]} {'among' if value[layers[0]] else 'not among'} them" if layers else ""
        return f"{yes} of {len(value)} layers{odd}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else str(value) if type(value) is int else brief(value)


def findings(compared: Iterable[Compared], *, strict: bool = False) -> list[Defect]:
    """Defects and warnings for the claims that the config contradicts."""
    found = []
    for one in compared:
        if one.agrees:
            continue
        what = f"says {one.name} {one.said}, config.json {one.held} ({one.field})"
        error = one.moves or strict
        hint = (
            "name the config of the model that was trained: --origin-hf-dir"
            if error
            else "the weights are the same, what they compute is not; --strict refuses it"
        )
        found.append(Defect(KIND, what, one.where, hint, "error" if error else "warning"))
    return found


def says_tied(sources: Iterable[Fields]) -> bool | None:
    """Whether the run says that its head is its embedding; None where it says nothing."""
    return next((tied for fields in sources if (tied := fields.tied()) is not None), None)


def says_router_bias(sources: Iterable[Fields]) -> bool | None:
    """Whether the run says that its router has a learnt bias; None where it says nothing."""
    said = (fields.flag("moe_router_enable_expert_bias") for fields in sources if fields.experts is not None)
    return next((bias for bias in said if bias is not None), None)
