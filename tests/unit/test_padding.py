"""Rows past the vocabulary are dropped only where they are zero, or the run itself calls them padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glmconv import SourceOptions, TargetOptions, convert
from glmconv.basics.errors import DataError
from glmconv.commands.convert import RunOptions, plan_conversion
from glmconv.source.conditions import Blank
from tests.support.plain import plain
from tests.support.trained import set_args

OUT = TargetOptions(to="hf")


def run(tmp_path: Path, rows: int, vocab: int, args: dict[str, Any] | None, **config: Any) -> SourceOptions:
    """A run whose embedding has ``rows`` rows of values, and a config that says ``vocab``."""
    made = plain("qwen3", vocab_size=rows, **config)
    convert(made.write(tmp_path / "start"), tmp_path / "run")
    made.config["vocab_size"] = vocab
    made.tensors.clear()
    made.write(tmp_path / "hf")
    unit = tmp_path / "run" / "release"
    (unit / "glmconv.json").unlink()
    set_args(unit, args or {}, without=("vocab_size", "padded_vocab_size") if args is None else ())
    return SourceOptions(origin_hf_dir=tmp_path / "hf")


DECLARED = [
    {"vocab_size": 67, "padded_vocab_size": 70},
    {
        "vocab_size": None,
        "padded_vocab_size": 70,
        "make_vocab_size_divisible_by": 5,
        "tensor_model_parallel_size": 2,
    },
]
NOT_DECLARED = [
    None,
    {"vocab_size": None, "padded_vocab_size": 70, "make_vocab_size_divisible_by": 1},
    {"vocab_size": None, "padded_vocab_size": 70, "make_vocab_size_divisible_by": 128},
]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("args", NOT_DECLARED)
def test_trained_rows_are_never_lost(tmp_path: Path, args: dict[str, Any] | None, dry_run: bool) -> None:
    source = run(tmp_path, 70, 67, args)
    with pytest.raises(DataError, match="vocab"):
        convert(
            tmp_path / "run", tmp_path / "out", source=source, target=OUT, run=RunOptions(dry_run=dry_run)
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", DECLARED)
def test_declared_padding_is_dropped_and_said(tmp_path: Path, args: dict[str, Any]) -> None:
    source = run(tmp_path, 70, 67, args)
    report = convert(tmp_path / "run", tmp_path / "out", source=source, target=OUT)
    assert any("whatever they hold" in str(warning) for warning in report.warnings)


def test_zero_rows_are_padding(tmp_path: Path) -> None:
    hf = plain("qwen3").write(tmp_path / "start")
    vocab = plain("qwen3").config["vocab_size"]
    convert(hf, tmp_path / "run", target=TargetOptions(to="megatron", padded_vocab=vocab + 61))
    set_args(tmp_path / "run" / "release", {}, without=("vocab_size", "padded_vocab_size"))
    planned = plan_conversion(tmp_path / "run", target=OUT)
    assert any(isinstance(one, Blank) for one in planned.plan.conditions)
    convert(tmp_path / "run", tmp_path / "out", target=OUT)
