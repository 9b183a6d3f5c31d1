"""What a cast loses is counted by tensor and told; what it cannot hold is refused by name."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, Interrupted
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Outcome, Stop, execute, unit_dir
from glmconv.engine.journal import JOURNAL, open_journal
from glmconv.engine.rounding import Rounding
from glmconv.plan.plan import Move, Plan
from glmconv.plan.planner import TargetOptions
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_plans import Planner, read_tree

ZERO, SUBNORMAL = np.float32(1e-9), np.float32(1e-6)
JOURNAL_BYTES = 4 << 20


def lossy_plan(root: Path) -> tuple[Plan, dict[str, Rounding]]:
    """F32 to F16: whole, strided and interleaved casts over many slots and files, with what they lose."""
    planner, rng = Planner(root), np.random.default_rng(0)
    expected: dict[str, Rounding] = {}
    cast = (DType.F32, DType.F16)
    for number in range(3):
        target = planner.target(f"file-{number}")
        for _ in range(3):
            values = rng.standard_normal(rng.integers(3_000_000, 9_000_000) // 4 * 4).astype(np.float32)
            values += np.float32(0.5) * (np.abs(values) < 1e-3)
            small = rng.random(values.size)
            values[small < 1e-4] = ZERO
            values[(small >= 1e-4) & (small < 3e-4)] = SUBNORMAL
            src = planner.source(0, values.tobytes())
            row = values.size  # a quarter of the values in bytes
            moves = {
                0: [Move(src, 0, 0, values.nbytes, cast=cast)],
                1: [  # two halves, their runs interleaved
                    Move(src, 0, 0, row // 2, 4, row // 2, row // 2, cast),
                    Move(src, 2 * row, row // 4, row // 2, 4, row // 2, row // 2, cast),
                ],
                2: [Move(src, 0, 0, 16, values.size // 4, 16, 8, cast)],
            }[number]
            if number == 1 and row % 8:
                moves = [Move(src, 0, 0, values.nbytes, cast=cast)]
            payload = planner.payload(target, values.size * 2, moves)
            payload.name = f"{target.path}/{payload.name}"
            expected[payload.name] = Rounding(int((values == ZERO).sum()), int((values == SUBNORMAL).sum()))
    return planner.plan(), expected


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, Rounding]]:
    return lossy_plan(tmp_path_factory.mktemp("lossy"))


def staging(tmp_path: Path, name: str = "s") -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("hash_mode", ["full", "none"])
def test_counts_do_not_depend_on_workers_or_hashes(
    lossy: tuple[Plan, dict[str, Rounding]], tmp_path: Path, workers: int, hash_mode: str
) -> None:
    plan, expected = lossy
    place = staging(tmp_path)
    outcome = execute(plan, place, workers=workers, hash_mode=hash_mode, journal_bytes=JOURNAL_BYTES)  # type: ignore[arg-type]
    assert outcome.rounding == expected


def run_with_stops(
    plan: Plan, place: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Outcome]:
    """Stop after some writes, again and again, each time in a new run; how often, and the last outcome."""
    real, stops = os.pwritev, 0
    while True:
        left, stop = [12], Stop()

        def pwritev(
            fd: int, buffers: list[memoryview], offset: int, left: list[int] = left, stop: Stop = stop
        ) -> int:
            left[0] -= 1
            if left[0] < 0:
                stop.request(signal.SIGTERM)
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            try:
                return stops, execute(plan, place, workers=workers, stop=stop, journal_bytes=JOURNAL_BYTES)
            except Interrupted:
                stops += 1
                assert stops < 200


@pytest.mark.parametrize("workers", [1, 3])
def test_counts_are_right_after_many_interruptions(
    lossy: tuple[Plan, dict[str, Rounding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    plan, expected = lossy
    stops, outcome = run_with_stops(plan, staging(tmp_path), workers, monkeypatch)
    assert stops > 2
    assert outcome.bytes_reused
    assert outcome.rounding == expected


def test_counts_are_right_where_a_finished_file_has_to_be_done_again(
    lossy: tuple[Plan, dict[str, Rounding]], tmp_path: Path
) -> None:
    plan, expected = lossy
    place = staging(tmp_path)
    before = execute(plan, place)
    content = read_tree(unit_dir(place))
    (unit_dir(place) / "file-1").unlink()
    again = execute(plan, place)
    assert 0 < again.bytes_reused < plan.payload_bytes
    assert before.rounding == again.rounding == expected
    assert read_tree(unit_dir(place)) == content


def test_slots_that_two_holders_recorded_are_counted_once(
    lossy: tuple[Plan, dict[str, Rounding]], tmp_path: Path
) -> None:
    """One that lost the directory may record slots after its successor read the journal."""
    plan, expected = lossy
    place = staging(tmp_path)
    execute(plan, place, journal_bytes=JOURNAL_BYTES)
    journal, found = open_journal(place / JOURNAL, plan, "full")
    assert found is not None
    journal.append(found.finished)
    journal.close()
    assert execute(plan, place).rounding == expected


def test_an_overflow_tells_the_whole_tensor(tmp_path: Path) -> None:
    planner = Planner(tmp_path)
    values = np.ones(4_000_000, np.float32)
    values[[0, 1_234_567, 3_999_999]] = [1e5, -3e6, 7e4]
    target = planner.target("file")
    cast = (DType.F32, DType.F16)
    payload = planner.payload(
        target, 8_000_000, [Move(planner.source(0, values.tobytes()), 0, 0, values.nbytes, cast=cast)]
    )
    payload.name = "layers.0.weight"
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            execute(planner.plan(b""), staging(tmp_path, f"s{workers}"), workers=workers)
        message = str(caught.value)
        assert message.startswith("layers.0.weight: 3 values do not fit F16")
        assert "largest magnitude is 3000000.0" in message
        assert "of 4,000,000 values" in message
        assert planner.sources[0].address in message
        assert "bf16" in caught.value.hint


GATE = "model.layers.0.mlp.gate_proj.weight"


def changed_checkpoint(out: Path, values: list[float]) -> Path:
    """A small checkpoint in fp32 whose first gate begins with ``values``, all else of normal size."""
    make_checkpoint("qwen3", out, dtype="float32")
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor[tensor.abs() < 1e-3] = 1e-3
        if GATE in tensors:
            tensors[GATE].view(-1)[: len(values)] = torch.tensor(values)
        save_file(tensors, file, {"format": "pt"})
    return out


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_report_manifest_and_stderr_tell_what_was_lost(tmp_path: Path, to: str) -> None:
    from glmconv.cli import _register, app

    hf = changed_checkpoint(tmp_path / "hf", [1e-9, -1e-9, 1e-6, 0.0])
    _register()
    words = ["convert", str(hf), str(tmp_path / "out"), "--to", to, "--dtype", "float16", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert {name: told["rounding"][name] for name in ("tensors", "to_zero", "to_subnormal")} == {
        "tensors": 1,
        "to_zero": 2,
        "to_subnormal": 1,
    }
    stored = GATE if to == "hf" else told["rounding"]["most"][0]["name"]
    assert told["rounding"]["most"] == [{"name": stored, "to_zero": 2, "to_subnormal": 1}]
    assert any("2 values zero" in line and stored in line for line in told["warnings"])
    manifest = json.loads((Path(told["path"]) / "glmconv.json").read_text())
    assert manifest["rounding"] == told["rounding"]
    assert manifest["warnings"] == told["warnings"]


def test_nothing_lost_is_no_warning(tmp_path: Path) -> None:
    hf = changed_checkpoint(tmp_path / "hf", [])
    report = convert(hf, tmp_path / "out", target=TargetOptions(to="hf", dtype="bfloat16"))
    assert report.to_json()["rounding"] == {"tensors": 0, "to_zero": 0, "to_subnormal": 0, "most": []}
    assert [one for one in report.warnings if one.kind == "rounding"] == []


def test_an_overflow_leaves_nothing_and_names_the_tensor(tmp_path: Path) -> None:
    hf = changed_checkpoint(tmp_path / "hf", [1e5, -2e6])
    with pytest.raises(DataError) as caught:
        convert(hf, tmp_path / "out", target=TargetOptions(to="hf", dtype="float16"), run=RunOptions())
    assert str(caught.value).startswith(f"{GATE}: 2 values do not fit F16")
    assert "2000000.0" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == [hf]
