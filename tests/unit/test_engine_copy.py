"""The engine writes what a naive executor writes: every kind of move, window, mode and number of workers."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import glmconv.engine.blend
import glmconv.engine.clone
import glmconv.engine.copy
import glmconv.engine.hashes
import glmconv.engine.run
import glmconv.engine.segments
import glmconv.engine.slots
from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.engine import CopyMode, HashMode, Outcome, execute, hash_range, tree_digest, unit_dir
from glmconv.engine.clone import extents
from glmconv.plan.plan import Move, Plan
from glmconv.source.conditions import Equal
from glmconv.storage.local import MTIME, LocalFile, identify
from tests.support.engine_plans import (
    Planner,
    column_shards,
    expected_digests,
    expected_files,
    mixed_plan,
    read_tree,
)

SMALL: dict[ModuleType, dict[str, int]] = {
    glmconv.engine.hashes: {"HASH_LEAF": 64},
    glmconv.engine.slots: {"HASH_LEAF": 64},
    glmconv.engine.run: {"JOB_BYTES": 1000},
    glmconv.engine.copy: {"WINDOW": 96, "PAGE": 16, "SMALL_GAP": 8, "OFFLOAD_STEP": 50},
    glmconv.engine.blend: {"FAR_ROWS": 8, "CAST_BLOCK": 24},
    glmconv.engine.segments: {"LONG_RUN": 20, "FAR_APART": 60},
}
"""Constants scaled down, so that small payloads meet every edge of windows, leaves and jobs."""


def run(plan: Plan, staging: Path, **options: object) -> Outcome:
    staging.mkdir(exist_ok=True)
    return execute(plan, staging, **options)  # type: ignore[arg-type]


def bytes_done(outcome: Outcome) -> int:
    """The four ways in which a payload byte can come, and those of an earlier run."""
    done = outcome.bytes_cloned + outcome.bytes_copied + outcome.bytes_computed
    return done + outcome.bytes_zero + outcome.bytes_reused


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, bytes]]:
    plan = mixed_plan(tmp_path_factory.mktemp("sources"))
    return plan, expected_files(plan)


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("copy_mode", ["auto", "copy"])
@pytest.mark.parametrize("hash_mode", ["full", "none"])
def test_every_mode_writes_the_planned_bytes(
    mixed: tuple[Plan, dict[str, bytes]],
    tmp_path: Path,
    workers: int,
    copy_mode: CopyMode,
    hash_mode: HashMode,
) -> None:
    plan, files = mixed
    outcome = run(plan, tmp_path / "s", workers=workers, copy_mode=copy_mode, hash_mode=hash_mode)
    assert read_tree(unit_dir(tmp_path / "s")) == files
    assert outcome.leaves == (expected_digests(plan, files) if hash_mode == "full" else {})
    assert bytes_done(outcome) == plan.payload_bytes
    assert outcome.bytes_literal == sum(len(data) for t in plan.targets for _, data in t.literals)


def test_a_payload_digest_is_the_hash_of_its_leaf_digests(tmp_path: Path) -> None:
    planner = Planner(tmp_path)
    target = planner.target("file")
    payload = planner.straight(target, planner.source(9 << 20), 3, (8 << 20) + 5)
    outcome = run(planner.plan(), tmp_path / "s")
    written = LocalFile(identify(unit_dir(tmp_path / "s") / "file"))
    leaves = hash_range(written, payload.offset, payload.size)
    written.close()
    assert len(leaves) == 3 * 16
    assert outcome.leaves["file", 0] == leaves
    assert outcome.digest("file", 0) == tree_digest(leaves)


@st.composite
def tiled_moves(draw: st.DrawFn) -> tuple[int, list[Move]]:
    """A payload ``[rows, width]`` cut into columns, some of them missing; each comes from its own place."""
    rows = draw(st.integers(1, 40))
    widths = draw(st.lists(st.integers(1, 30).map(lambda w: 4 * w), min_size=1, max_size=4))
    moves, column = [], 0
    for width in widths:
        kind = draw(st.sampled_from(["dense", "strided", "apart", "repeated", "cast", "missing"]))
        start = draw(st.integers(0, 500))
        run = width if kind != "cast" else 2 * width
        stride = {"dense": run, "strided": run + 5, "apart": run + 90, "repeated": 0, "cast": run}.get(
            kind, 0
        )
        cast = (DType.F32, DType.BF16) if kind == "cast" else None
        if kind != "missing":
            moves.append(Move(0, 4 * start, column, run, rows, stride, sum(widths), cast))
        column += width
    return rows * sum(widths), moves


@settings(max_examples=80, deadline=None)
@given(
    st.lists(tiled_moves(), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["auto", "copy"]),
    st.sampled_from([256, 1 << 20]),
)
def test_any_tiling_is_written_exactly(
    tilings: list[tuple[int, list[Move]]], workers: int, copy_mode: CopyMode, journal_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module, constants in SMALL.items():
            for name, value in constants.items():
                patch.setattr(module, name, value)
        patch.setattr(
            glmconv.engine.hashes, "zero_leaf_digest", glmconv.engine.hashes.zero_leaf_digest.__wrapped__
        )
        patch.setattr(os, "fsync", lambda fd: None)  # hundreds of runs: flushing them tests nothing here
        patch.setattr(os, "fdatasync", lambda fd: None)
        planner = Planner(Path(folder))
        planner.source(0, b"".join(bytes([i % 251, i % 7, i % 100, 64]) for i in range(9000)))
        target = planner.target("file")
        for size, moves in tilings:
            planner.payload(target, size, moves)
        plan = planner.plan()
        outcome = run(
            plan, Path(folder) / "s", workers=workers, copy_mode=copy_mode, journal_bytes=journal_bytes
        )
        assert read_tree(unit_dir(Path(folder) / "s")) == expected_files(plan)
        assert bytes_done(outcome) == plan.payload_bytes


def test_column_shards_of_a_large_matrix_come_together(tmp_path: Path) -> None:
    planner = Planner(tmp_path)
    src = planner.source(5 << 20)
    planner.payload(planner.target("file"), 5000 * 1000, column_shards(src, 5000, [500, 250, 250]))
    plan = planner.plan()
    run(plan, tmp_path / "s")
    assert read_tree(unit_dir(tmp_path / "s")) == expected_files(plan)


def test_holes_of_a_sparse_source_stay_holes(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
        for at in (1 << 20, (600 << 20) + 123):
            file.seek(at)
            file.write(b"data" * 1000)
    planner = Planner(tmp_path)
    src = planner.adopt(path)
    for number in range(2):
        target = planner.target(f"file-{number}")
        planner.straight(target, src, number << 29, 1 << 29)
    outcome = run(planner.plan(), tmp_path / "s")
    written = [unit_dir(tmp_path / "s") / f"file-{number}" for number in range(2)]
    assert sum(path.stat().st_blocks * 512 for path in written) < 4 << 20
    assert outcome.bytes_zero > 1 << 29
    with open(written[1], "rb") as file:
        file.seek(3 + (88 << 20) + 123 + (-3) % 4096)
        assert file.read(4000) == b"data" * 1000
    held = LocalFile(identify(written[1]))
    assert outcome.leaves["file-1", 0] == hash_range(held, 4096, 1 << 29)
    held.close()


def test_extents_tell_holes_and_data_in_order(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(4 << 20)
        file.seek(1 << 20)
        file.write(b"x" * (1 << 20))
    source = LocalFile(identify(path))
    try:
        found = list(extents(source, 100, (4 << 20) - 100))
    finally:
        source.close()
    assert [kind for kind, _, _ in found] == [True, False, True]
    assert found[0][1:] == (100, (1 << 20) - 100)
    assert sum(size for _, _, size in found) == (4 << 20) - 100


def two_payloads(root: Path) -> Planner:
    planner = Planner(root)
    src = planner.source(3 << 20)
    target = planner.target("file")
    for offset in (0, 1 << 20):
        planner.straight(target, src, offset, 1 << 20)
    return planner


@pytest.mark.parametrize("change", ["shrink", "grow", "touch"])
def test_a_changed_source_is_refused_before_any_work(tmp_path: Path, change: str) -> None:
    plan = two_payloads(tmp_path).plan()
    path = Path(plan.sources[0].address)
    if change == "touch":
        os.utime(path, ns=(0, 0))
    else:
        os.truncate(path, (1 << 20) if change == "shrink" else (4 << 20))
        os.utime(path, ns=(int(dict(plan.sources[0].version)[MTIME]),) * 2)
    with pytest.raises(DataError, match=r"shrank|grew|modified") as caught:
        run(plan, tmp_path / "s")
    assert caught.value.where == os.fspath(path)
    assert not unit_dir(tmp_path / "s").exists()


def test_a_source_that_is_short_of_a_move_is_an_error_not_zeros(tmp_path: Path) -> None:
    planner = two_payloads(tmp_path)
    planner.straight(planner.targets[0], 0, (3 << 20) - 100, 200)
    with pytest.raises(DataError, match="100 bytes short"):
        run(planner.plan(), tmp_path / "s")


@pytest.mark.parametrize("change", ["shrink", "touch"])
def test_a_source_that_changes_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    plan = two_payloads(tmp_path).plan()
    path = Path(plan.sources[0].address)
    copier_run = glmconv.engine.copy.Copier.run

    def changing(self: object, *args: object) -> object:
        done = copier_run(self, *args)  # type: ignore[arg-type]
        if change == "shrink":
            os.truncate(path, 1 << 20)
        os.utime(path, ns=(1, 1))
        return done

    monkeypatch.setattr(glmconv.engine.copy.Copier, "run", changing)
    with pytest.raises(DataError, match=r"shrank|modified"):
        run(plan, tmp_path / "s")


def test_a_missing_source_is_a_storage_error(tmp_path: Path) -> None:
    plan = two_payloads(tmp_path).plan()
    os.unlink(plan.sources[0].address)
    with pytest.raises(StorageError, match="No such file"):
        run(plan, tmp_path / "s")


def test_duplicates_that_differ_are_named_with_the_first_byte(tmp_path: Path) -> None:
    planner = two_payloads(tmp_path)
    data = bytearray(Path(planner.sources[0].address).read_bytes())
    data[(2 << 20) + 77] ^= 1
    other = planner.source(0, bytes(data))
    planner.conditions.append(Equal("embedding", "mtp.embedding", 0, 5, other, 5, (3 << 20) - 5))
    with pytest.raises(DataError, match=f"embedding and mtp.embedding .* byte {(2 << 20) + 72} of"):
        run(planner.plan(), tmp_path / "s")


def test_overlapping_moves_and_payloads_are_defects_of_the_plan(tmp_path: Path) -> None:
    planner = two_payloads(tmp_path)
    planner.payload(planner.targets[0], 200_000, [Move(0, 0, 0, 150_000), Move(0, 0, 149_999, 50_001)])
    with pytest.raises(DataError, match="overlap"):
        run(planner.plan(), tmp_path / "a")
    planner = two_payloads(tmp_path)
    planner.targets[0].payloads[1].offset -= 1 << 19
    with pytest.raises(DataError, match="overlap"):
        run(planner.plan(), tmp_path / "b")


@pytest.mark.parametrize("path", ["../file", "/file", "a/../../file", ""])
def test_a_target_outside_of_the_unit_is_refused(tmp_path: Path, path: str) -> None:
    plan = two_payloads(tmp_path).plan()
    plan.targets[0] = replace(plan.targets[0], path=path)
    with pytest.raises(DataError, match="inside the output"):
        run(plan, tmp_path / "s")


def test_an_overflowing_cast_names_tensor_and_file(tmp_path: Path) -> None:
    planner = Planner(tmp_path)
    src = planner.source(0, np.full(100, 1e6, np.float32).tobytes())
    planner.payload(planner.target("file"), 200, [Move(src, 0, 0, 400, cast=(DType.F32, DType.F16))])
    with pytest.raises(DataError, match="100 values do not fit F16") as caught:
        run(planner.plan(), tmp_path / "s")
    assert caught.value.where == "t0"
    assert f"of 100 values, from {planner.sources[0].address}" in caught.value.what
