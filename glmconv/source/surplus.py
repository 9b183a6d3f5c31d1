"""Tensors of a checkpoint that its model does not ask for: duplicates, drops, surprises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from glmconv.basics.errors import Defect
from glmconv.formats.stored import StoredTensor
from glmconv.source.conditions import Dropped, Equal
from glmconv.source.locate import Found
from glmconv.source.source import Source
from glmconv.tables.expand import expand_drops, expand_tied

BY_DROP_MTP = "MTP layer, dropped by --drop-mtp"

MTP_MARKS = ("enorm.weight", "eh_proj.weight")
"""Every MTP layer has them and no decoder layer has."""


def mtp_prefixes(source: Source, names: Iterable[str]) -> Iterator[str]:
    """Prefixes of the MTP layers that ``names`` hold beyond those that the config promises."""
    if source.bridge.mtp_field is None:
        return
    spec, axis, have = source.spec, source.table.mtp, frozenset(names)
    template, first = axis.mcore, spec.num_mtp
    if source.kind == "hf":
        template, first = axis.hf, spec.num_mtp + (spec.num_layers if axis.hf_after_layers else 0)
    number = first
    while all((prefix := f"{template.replace('{n}', str(number))}.") + mark in have for mark in MTP_MARKS):
        yield prefix
        number += 1


def drop_surplus_mtp(source: Source, found: Found) -> None:
    """Drop MTP layers of the files of which the config knows nothing, as ``--drop-mtp`` asks."""
    for prefix in list(mtp_prefixes(source, found.unused)):
        for name in [name for name in found.unused if name.startswith(prefix)]:
            tensor = found.unused.pop(name)
            source.dropped.append(Dropped(name, BY_DROP_MTP, tensor.nbytes))


def explain_unused(source: Source, found: Found) -> None:
    """Sort unused tensors of an HF checkpoint into duplicates, drops and surprises."""
    explain_layers(source, found.unused)
    drops, tied = expand_drops(source.table, source.spec), expand_tied(source.table, source.spec)
    for name, tensor in found.unused.items():
        if name in tied:
            _duplicate(source, tensor, tied[name])
        elif name in drops:
            source.dropped.append(Dropped(name, drops[name].reason, tensor.nbytes))
            if drops[name].warn:
                source.warnings.append(Defect("unused", drops[name].reason, name, severity="warning"))
        else:
            source.defects.append(
                Defect("unexpected", f"{tensor.dtype.label}{list(tensor.shape)} belongs to no rule", name)
            )


def explain_layers(source: Source, unused: Iterable[str]) -> None:
    """Say it in one line where the files hold more layers than the config promises."""
    spec, table, field = source.spec, source.table, source.bridge.mtp_field
    hf = source.kind == "hf"
    surplus = {prefix.removesuffix(".") for prefix in mtp_prefixes(source, unused)}
    axes = [(table.layer.hf if hf else table.layer.mcore, spec.num_layers + (spec.num_mtp if hf else 0))]
    axes += [] if hf else [(table.mtp.mcore, spec.num_mtp)]
    for axis, promised in axes:
        head = axis.partition("{n}")[0]
        numbers = {name[len(head) :].partition(".")[0] for name in unused if name.startswith(head)}
        beyond = [
            int(n) for n in numbers if n.isascii() and n.isdigit() and len(n) < 10 and int(n) >= promised
        ]
        if not beyond:
            continue
        mtp = "" if field is None else f" and {spec.num_mtp} MTP layers ({field})"
        hint = "correct config.json if the layers belong to the model"
        if f"{head}{min(beyond)}" in surplus:
            hint = (
                f"by its enorm and eh_proj it is an MTP layer: --drop-mtp leaves it out; or correct {field} "
                "if it belongs to the model"
            )
        source.defects.append(
            Defect(
                "unexpected",
                f"the files hold layer {max(beyond)}, config.json promises {spec.num_layers} layers{mtp}",
                f"{head}{min(beyond)}",
                hint,
            )
        )


def _duplicate(source: Source, tensor: StoredTensor, to: str) -> None:
    """A duplicate is dropped, on condition that its bytes equal those of the tensor it repeats."""
    other = source.stored.get(to)
    if other is None or other.shape != tensor.shape or other.dtype is not tensor.dtype:
        source.defects.append(Defect("duplicate", f"does not have the shape and dtype of {to}", tensor.name))
        return
    left, right = tensor.chunks[0], other.chunks[0]
    source.equal.append(
        Equal(tensor.name, to, left.file, left.offset, right.file, right.offset, tensor.nbytes)
    )
    source.dropped.append(Dropped(tensor.name, f"repeats {to}", tensor.nbytes))
