"""Every element that ``--dtype`` loses is counted, as the checkpoint's values say, in whichever run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from glmconv.basics.errors import Interrupted
from glmconv.commands.conversion_report import Report
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Progress, Stop
from glmconv.plan.planner import TargetOptions
from tests.support.plain import Plain, Tensor, plain

Counts = tuple[int, int]


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def values_of(tensor: Tensor) -> np.ndarray:
    bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def small(model: str) -> Plain:
    """A checkpoint of numbers between 1e-9 and 10, the fp32-locked ones too."""
    made = plain(model)
    rng = np.random.default_rng(4)
    for tensor in made.tensors.values():
        count = int(np.prod(tensor.shape))
        values = rng.standard_normal(count) * 10.0 ** rng.uniform(-9, 1, count)
        tensor.data = values.astype(np.float32).tobytes() if tensor.dtype == "F32" else bf16(values)
    return made


def lost_in_f16(made: Plain) -> dict[str, Counts]:
    """Of each tensor that is cast (all but the locked ones): what F16 calls zero, what subnormal."""
    counts = {}
    for name, tensor in made.tensors.items():
        if tensor.dtype == "BF16":
            size = np.abs(values_of(tensor))
            to_zero = (size > 0) & (size <= 2.0**-25)
            to_subnormal = (size > 2.0**-25) & (size < 2.0**-14 - 2.0**-25)
            counts[name] = int(to_zero.sum()), int(to_subnormal.sum())
    return counts


def total(counts: dict[str, Counts]) -> Counts:
    return sum(zero for zero, _ in counts.values()), sum(subnormal for _, subnormal in counts.values())


def told(report: Report) -> Counts:
    rounding = report.to_json()["rounding"]
    manifest = json.loads((report.path / "glmconv.json").read_text())
    assert manifest["rounding"] == rounding
    assert [one.kind for one in report.warnings].count("rounding") == (rounding["tensors"] > 0)
    return rounding["to_zero"], rounding["to_subnormal"]


@pytest.mark.parametrize("model", ["qwen3", "glm-5.2", "qwen3-moe"])
@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_every_element_that_is_lost_is_counted(tmp_path: Path, model: str, to: str) -> None:
    made = small(model)
    expected = lost_in_f16(made)
    assert min(total(expected)) > 0
    target = TargetOptions(to=to, dtype="float16")
    report = convert(made.write(tmp_path / "src"), tmp_path / "out", target=target)
    assert told(report) == total(expected)
    if to == "hf":
        for one in report.rounding["most"]:
            assert (one["to_zero"], one["to_subnormal"]) == expected[one["name"]]


def test_back_into_hf_is_counted_too(tmp_path: Path) -> None:
    made = small("qwen3-moe")
    there = convert(made.write(tmp_path / "src"), tmp_path / "there", target=TargetOptions(to="megatron"))
    assert told(there) == (0, 0)
    back = convert(tmp_path / "there", tmp_path / "back", target=TargetOptions(to="hf", dtype="float16"))
    assert told(back) == total(lost_in_f16(made))


def test_an_interrupted_run_tells_the_same_as_one_in_peace(tmp_path: Path) -> None:
    """And a run that finds its unit published tells what the manifest says."""
    src = small("glm-5.2").write(tmp_path / "src")
    target = TargetOptions(to="megatron", dtype="float16")
    calm = convert(src, tmp_path / "calm", target=target)
    stop = Stop()

    def look(progress: Progress) -> None:
        stop.request()

    brief = RunOptions(journal_bytes=1)
    with pytest.raises(Interrupted):
        convert(src, tmp_path / "out", target=target, progress=look, stop=stop, run=brief)
    resumed = convert(src, tmp_path / "out", target=target, run=RunOptions(workers=3))
    assert told(resumed) == told(calm)
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").unlink()
    finished = convert(src, tmp_path / "out", target=target)
    assert finished.finished_earlier
    assert told(finished) == told(calm)
