"""Plans at full real size, from headers on sparse files: names, shapes and dtypes equal the goldens."""

from __future__ import annotations

from pathlib import Path

import pytest

from glmconv.commands.convert import plan_conversion
from glmconv.plan.planner import TargetOptions
from glmconv.tables.rules import DIALECTS
from tests.support.checkpoints import FULL_MODELS, make_headers_only
from tests.support.golden import load_golden

CASES = [(model, "mcore") for model in FULL_MODELS]
CASES += [("glm-5.2", dialect) for dialect in DIALECTS if dialect != "mcore"]


@pytest.mark.parametrize(("model", "dialect"), CASES)
def test_a_full_size_plan_holds_what_the_golden_says(tmp_path: Path, model: str, dialect: str) -> None:
    hf = make_headers_only(model, tmp_path / "hf")
    planned = plan_conversion(hf, None, TargetOptions(to="megatron", dialect=dialect))
    extents: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    for target, payload in planned.plan.payloads():
        if target.path.endswith(".distcp"):
            ends = [start + size for start, size in zip(payload.place, payload.shape, strict=True)]
            known = extents.setdefault(payload.name, ends)
            extents[payload.name] = [max(pair) for pair in zip(known, ends, strict=True)]
            assert dtypes.setdefault(payload.name, payload.dtype.label) == payload.dtype.label
    golden = load_golden(f"{model}.{dialect}")
    assert {name: tuple(shape) for name, shape in extents.items()} == {n: s for n, (s, _) in golden.items()}
    assert dtypes == {name: dtype for name, (_, dtype) in golden.items()}
    back = {name: (tensor.shape, tensor.dtype.label) for name, tensor in planned.source.stored.items()}
    assert back == load_golden(model)
