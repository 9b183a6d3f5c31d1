"""Tensors that a family keeps in a wide dtype: router biases, whose spread is far below their size."""

from __future__ import annotations

import numpy as np

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.checks.findings import CheckReport, LockedTensor
from glmconv.checks.subject import Subject
from glmconv.source.locate import Located
from glmconv.values.reader import Bits, Reader, floats, nbytes


def check_locked(report: CheckReport, subject: Subject) -> None:
    """Dtype and number of distinct values of every locked tensor of every layer.

    A bias near 7 with a spread of 0.25 has some hundred values in fp32 and 8 in bf16, which changes
    the experts of almost every token.
    """
    source = subject.source
    coarse: list[str] = []
    with Reader(source.files) as reader:
        for name, located in source.tensors.items():
            if located.tensor.lock is None:
                continue
            try:
                bits = reader.whole(located)
            except DataError as error:
                report.note("unreadable", error.what, error.where or name, error.hint)
                continue
            report.bytes_read += nbytes(located)
            values = floats(bits, located.dtype)
            found = LockedTensor(name, located.dtype.label, bits.size, len(np.unique(values)))
            report.locked.append(found)
            if located.dtype.itemsize < located.tensor.lock.itemsize:
                _narrow(report, subject, located, found)
            elif _was_rounded(bits, located.dtype):
                coarse.append(f"{name} ({found.distinct} of {found.size} values distinct)")
    if coarse:
        origin = "; the manifest says that the origin stored them so" if source.widened else ""
        report.note(
            "router-bias",
            f"{len(coarse)} tensors are stored wide but hold only values of bf16: they were rounded{origin}",
            coarse[0] + (" …" if len(coarse) > 1 else ""),
            "convert again from a checkpoint that never had them in bf16",
            "warning",
        )


def _narrow(report: CheckReport, subject: Subject, located: Located, found: LockedTensor) -> None:
    lock = located.tensor.lock
    report.note(
        "router-bias",
        f"is {found.dtype}, must be {lock.label if lock else ''}: {found.distinct} distinct values of "
        f"{found.size}; rounding changes which experts tokens go to",
        subject.place(found.name),
        "take it from a checkpoint that has it in fp32; a wider dtype alone brings nothing back",
    )


def _was_rounded(bits: Bits, dtype: DType) -> bool:
    """Whether fp32 values are all representable in bf16, and not simply all alike."""
    if dtype is not DType.F32 or bits.size < 2 or (bits == bits.flat[0]).all():
        return False
    return not (bits & np.uint32(0xFFFF)).any()
