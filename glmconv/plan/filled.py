"""Whether tensors from another checkpoint fit among those of the run that they fill."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import Defect
from glmconv.plan.draft import DtypePolicy
from glmconv.source.source import Source
from glmconv.values.reader import nbytes

_NUMBER = re.compile(r"\d+")


def misfits(source: Source, policy: DtypePolicy) -> Iterator[Defect]:
    """Filled tensors that would be stored in another dtype than their siblings, or than the run.

    Siblings are the same tensor of other layers and experts; a tensor without them is held against
    the dtype of most of the run's bytes.
    """
    if not source.filled:
        return
    own = {name: one for name, one in source.tensors.items() if name not in source.filled}
    siblings: dict[str, set[DType]] = {}
    sizes: Counter[DType] = Counter()
    for name, one in own.items():
        stored = policy.stored(one)
        siblings.setdefault(_NUMBER.sub("*", name), set()).add(stored)
        sizes[stored] += nbytes(one)
    usual = {max(sizes, key=lambda dtype: sizes[dtype])} if sizes else set()
    for name, path in source.filled.items():
        stored = policy.stored(source.tensors[name])
        expected = siblings.get(_NUMBER.sub("*", name), usual)
        if expected and stored not in expected:
            labels = " or ".join(sorted(dtype.label for dtype in expected))
            hint = "--dtype casts all tensors to one" if source.tensors[name].tensor.lock is None else ""
            yield Defect("dtype", f"is {stored.label} in {path}, the run's are {labels}", name, hint)
