"""What a run asks of the disk before it begins."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import glmconv.engine.clone as clone_module
from glmconv.basics.errors import DataError, StorageError
from glmconv.engine import execute, space_needed, space_taken, unit_dir
from glmconv.plan.plan import Move
from tests.support.engine_plans import Planner

MIB = 1 << 20


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that clones whatever it is asked to."""
    monkeypatch.setattr(clone_module, "clone_range", lambda *arguments: None)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(clone_module, "clone_range", fail)


def straight(root: Path, size: int = 8 * MIB, shift: int = 0) -> Planner:
    planner = Planner(root)
    src = planner.source(size + 10_000)
    planner.payload(planner.target("file"), size, [Move(src, 5000, 0, size)], residue=(5000 + shift) % 4096)
    return planner


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_a_copy_takes_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    refuse(monkeypatch)
    plan = straight(tmp_path).plan()
    assert space_needed(plan, tmp_path, mode) == plan.target_bytes


@pytest.mark.parametrize("mode", ["auto", "clone"])
def test_a_clone_takes_its_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    allow(monkeypatch)
    plan = straight(tmp_path).plan()
    assert 4096 < space_needed(plan, tmp_path, mode) < 8 * 4096


def test_what_does_not_lie_alike_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    plan = straight(tmp_path, shift=8).plan()
    assert space_needed(plan, tmp_path, "auto") == plan.target_bytes


def test_long_runs_are_cloned_and_short_ones_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    planner = Planner(tmp_path)
    src = planner.source(8 * MIB)
    for run in (1 << 18, 1 << 12):
        moves = [Move(src, start * run, start * run, run, 8, 2 * run, 2 * run) for start in (0, 1)]
        moves[0], moves[1] = (
            Move(src, run, 0, run, 8, 2 * run, 2 * run),
            Move(src, 0, run, run, 8, 2 * run, 2 * run),
        )
        planner.payload(planner.target(f"runs of {run}"), 16 * run, moves, residue=0)
    need = space_needed(planner.plan(), tmp_path, "auto")
    assert 16 << 12 < need < (16 << 12) + 20 * 8192


def test_holes_take_nothing_when_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"x" * MIB)
    planner = Planner(tmp_path)
    planner.straight(planner.target("file"), planner.adopt(path), 0, 1 << 40)
    plan = planner.plan()
    need = space_needed(plan, tmp_path, "auto")
    assert MIB <= need < 2 * MIB
    (tmp_path / "s").mkdir()
    execute(plan, tmp_path / "s", hash_mode="none")
    blocks = 2 * 4096  # of which the first and last byte are in
    assert os.stat(unit_dir(tmp_path / "s") / "file").st_blocks * 512 <= need + blocks


def test_clone_is_refused_and_a_changed_source_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    plan = straight(tmp_path).plan()
    with pytest.raises(StorageError, match="cannot share extents"):
        space_needed(plan, tmp_path, "clone")
    os.truncate(plan.sources[0].address, 5000)
    with pytest.raises(DataError, match="shrank"):
        space_needed(plan, tmp_path, "auto")


def test_a_source_that_vanishes_or_changes_before_the_first_clone_is_told(tmp_path: Path) -> None:
    """Between the look at all sources and the trial of a clone, a file may go."""
    plan = straight(tmp_path).plan()
    path = Path(plan.sources[0].address)
    sharing = clone_module.Sharing("auto", tmp_path, server_copy=False)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match="was modified since it was planned"):
        sharing.probe(plan.sources, tmp_path)
    path.unlink()
    for look in (
        lambda: sharing.probe(plan.sources, tmp_path),
        lambda: space_needed(plan, tmp_path, "auto"),
        lambda: execute(plan, tmp_path),
    ):
        with pytest.raises(StorageError, match="cannot read the source: No such file") as caught:
            look()
        assert caught.value.where == str(path)
    for looks in (
        lambda: clone_module.Sharing("auto", path, server_copy=False),
        lambda: clone_module.block_size(path),
    ):
        with pytest.raises(StorageError, match="No such file"):
            looks()


def test_what_an_earlier_run_wrote_is_counted_once_it_is_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "whole").write_bytes(b"x" * MIB)
    with (tmp_path / "unit" / "empty").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert MIB <= space_taken(tmp_path) < 2 * MIB
