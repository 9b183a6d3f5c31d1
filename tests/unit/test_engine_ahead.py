"""Edges of clones are asked for before their turn, and only where something is cloned."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import glmconv.engine.clone as clone_module
from glmconv.engine import HashMode, execute, unit_dir
from glmconv.engine.ahead import AHEAD
from glmconv.engine.outcome import CopyMode
from glmconv.plan.plan import Plan
from glmconv.storage.local import LocalFile
from tests.support.engine_plans import Planner, expected_files, read_tree

SIZE = (1 << 17) + 1000
PAYLOADS = 3 * AHEAD


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Payloads of a little over 128 KiB, one after the other in the source, in two files."""
    planner = Planner(tmp_path_factory.mktemp("ahead"))
    src = planner.source(SIZE * PAYLOADS)
    targets = [planner.target("a"), planner.target("b")]
    for number in range(PAYLOADS):
        planner.straight(targets[2 * number // PAYLOADS], src, number * SIZE, SIZE)
    return planner.plan()


class Seen:
    """Blocks of the source in the order in which they were asked for, and in which they were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.late: list[int] = []
        read_into, advise = LocalFile.read_into, os.posix_fadvise

        def reading(source: LocalFile, view: memoryview, offset: int) -> None:
            if offset // 4096 not in self.asked:
                self.late.append(offset)
            read_into(source, view, offset)

        def advising(fd: int, offset: int, size: int, advice: int) -> None:
            if advice == os.POSIX_FADV_WILLNEED:
                self.asked.append(offset // 4096)
            advise(fd, offset, size, advice)

        monkeypatch.setattr(LocalFile, "read_into", reading)
        monkeypatch.setattr(os, "posix_fadvise", advising)


def by_copying(source_fd: int, source_offset: int, target_fd: int, offset: int, size: int) -> None:
    """The kernel's call, where no filesystem of the tests has it."""
    os.pwrite(target_fd, os.pread(source_fd, size, source_offset), offset)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_edge_is_asked_for_once_and_before_it_is_read(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(clone_module, "clone_range", by_copying)
    seen = Seen(monkeypatch)
    execute(plan, tmp_path, hash_mode="none", workers=workers, journal_bytes=1 << 20)
    assert seen.late == []
    if workers == 1:
        assert PAYLOADS <= len(seen.asked) == len(set(seen.asked)) <= PAYLOADS + 3
    assert read_tree(unit_dir(tmp_path)) == expected_files(plan)


@pytest.mark.parametrize(("copy_mode", "hash_mode"), [("copy", "none"), ("auto", "full")])
def test_what_is_read_as_a_whole_is_not_asked_for(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_mode: CopyMode, hash_mode: HashMode
) -> None:
    monkeypatch.setattr(clone_module, "clone_range", by_copying)
    seen = Seen(monkeypatch)
    execute(plan, tmp_path, copy_mode=copy_mode, hash_mode=hash_mode)
    assert seen.asked == []


def test_where_nothing_can_be_cloned_nothing_is_asked_for(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(clone_module, "clone_range", refuse)
    seen = Seen(monkeypatch)
    execute(plan, tmp_path, hash_mode="none")
    assert seen.asked == []
