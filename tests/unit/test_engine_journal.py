"""The journal: what a later run may trust, and what it must refuse."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from glmconv.basics.errors import DataError, GlmconvError, Interrupted, StorageError
from glmconv.engine import Outcome, Stop, execute, unit_dir
from glmconv.engine.journal import Finished, Found, open_journal
from glmconv.plan.plan import Plan
from glmconv.storage.objects import StorageObject
from tests.support.engine_plans import Planner, expected_files, read_tree

SOURCE = StorageObject("/models/shard", 1000, (("mtime_ns", 123456789), ("ctime_ns", 0)), "abc")
PLAN = Plan([SOURCE], [], digest="the plan")


def begin(path: Path, plan: Plan = PLAN) -> None:
    journal, found = open_journal(path, plan, "full")
    assert found is None
    journal.begin(plan, "full")
    journal.append([Finished(0, 0, 3, b"0123456789abcdef" * 3), Finished(2, 5, 6)], [4])
    journal.append([Finished(0, 3, 4, b"f" * 16)])
    journal.close()


def reopen(path: Path, plan: Plan = PLAN, hash_mode: str = "full") -> Found | None:
    journal, found = open_journal(path, plan, hash_mode)
    journal.close()
    return found


def test_records_come_back(tmp_path: Path) -> None:
    begin(tmp_path / "journal")
    found = reopen(tmp_path / "journal")
    assert found is not None
    assert found.held == {4}
    assert found.finished == [
        Finished(0, 0, 3, b"0123456789abcdef" * 3),
        Finished(2, 5, 6),
        Finished(0, 3, 4, b"f" * 16),
    ]


def test_any_torn_tail_leaves_the_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begin(path)
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        found = reopen(path)
        assert (found is None) == (whole == 0 and size < ends[0] - 1)
        if found is not None:
            assert len(found.finished) + len(found.held) == sum(end - 1 <= size for end in ends) - 1


def test_appending_behind_a_torn_tail_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begin(path)
    os.truncate(path, path.stat().st_size - 5)
    journal, _ = open_journal(path, PLAN, "full")
    journal.append([Finished(1, 0, 1)])
    journal.close()
    found = reopen(path)
    assert found is not None
    assert [job.target for job in found.finished] == [0, 2, 1]


def test_a_damaged_record_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begin(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"s":0', b'"s":1')
    path.write_bytes(b"".join(lines))
    found = reopen(path)
    assert found is not None
    assert found.finished == [Finished(2, 5, 6), Finished(0, 3, 4, b"f" * 16)]


def test_a_damaged_header_means_that_nothing_was_done(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begin(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0].replace(b"full", b"none"), *lines[1:]]))
    assert reopen(path) is None


def test_late_records_of_an_earlier_holder_are_not_believed(tmp_path: Path) -> None:
    """A holder that was asleep wakes up and appends what it did before its lease ended."""
    path = tmp_path / "journal"
    begin(path)
    asleep, _ = open_journal(path, PLAN, "full")
    awake, _ = open_journal(path, PLAN, "full")
    asleep.append([Finished(7, 0, 1)])
    awake.append([Finished(8, 0, 1)])
    asleep.append([Finished(7, 1, 2)])
    asleep.close()
    awake.close()
    found = reopen(path)
    assert found is not None
    assert [done.target for done in found.finished] == [0, 2, 0, 8]


def test_nothing_is_written_once_the_directory_is_lost(tmp_path: Path) -> None:
    lost = [False]

    def guard() -> None:
        if lost[0]:
            raise StorageError("lost")

    path = tmp_path / "journal"
    begin(path)
    journal, _ = open_journal(path, PLAN, "full", guard)
    before = path.read_bytes()
    lost[0] = True
    for write in (lambda: journal.append([Finished(1, 0, 1)]), lambda: journal.forget(0)):
        with pytest.raises(StorageError, match="lost"):
            write()
    journal.close()
    assert path.read_bytes() == before


def test_what_is_forgotten_is_to_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begin(path)
    journal, _ = open_journal(path, PLAN, "full")
    journal.forget(0)
    journal.append([Finished(0, 1, 2)])
    journal.close()
    found = reopen(path)
    assert found is not None
    assert found.finished == [Finished(2, 5, 6), Finished(0, 1, 2)]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"size": 999}, DataError, "the size of /models/shard differs"),
        (
            {"version": (("mtime_ns", 1), ("ctime_ns", 0))},
            DataError,
            "the modification time of /models/shard differs",
        ),
        ({"header_digest": "abd"}, DataError, "the header of /models/shard differs"),
        (
            {"version": (("mtime_ns", 123456789), ("ctime_ns", 1))},
            DataError,
            "the time of change of /models/shard differs",
        ),
        ({"address": "/models/other"}, StorageError, "reads /models/shard, this one /models/other"),
    ],
)
def test_changed_sources_are_refused(
    tmp_path: Path, change: dict[str, object], error: type[GlmconvError], text: str
) -> None:
    begin(tmp_path / "journal")
    changed = replace(SOURCE, **change)  # type: ignore[arg-type]
    with pytest.raises(error, match=text) as caught:
        reopen(tmp_path / "journal", Plan([changed], [], digest="another plan"))
    assert "--overwrite" in caught.value.hint
    assert reopen(tmp_path / "journal") is not None


def test_another_plan_or_hash_mode_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "journal")
    with pytest.raises(StorageError, match="what it writes beside the weights differs"):
        reopen(tmp_path / "journal", Plan([SOURCE], [], digest="another"))
    with pytest.raises(StorageError, match="--hash full"):
        reopen(tmp_path / "journal", hash_mode="none")


def small_plan(root: Path, seed: int = 0) -> Plan:
    planner = Planner(root, seed)
    src = planner.source(9 << 20)
    for number in range(2):
        planner.straight(planner.target(f"file-{number}"), src, 100 * number, (8 << 20) + 1)
    return planner.plan()


def staged(plan: Plan, staging: Path, *, restart: bool = False) -> Outcome:
    staging.mkdir(exist_ok=True)
    return execute(plan, staging, restart=restart)


def test_restart_replaces_an_unfinished_run_of_another_plan(tmp_path: Path) -> None:
    plans: list[Plan] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        plans.append(small_plan(tmp_path / name, seed=len(plans)))
    staged(plans[0], tmp_path / "s")
    (unit_dir(tmp_path / "s") / "stray").write_text("of the other run")
    with pytest.raises(StorageError, match="never mixed"):
        staged(plans[1], tmp_path / "s")
    outcome = staged(plans[1], tmp_path / "s", restart=True)
    assert outcome.bytes_reused == 0
    assert read_tree(unit_dir(tmp_path / "s")) == expected_files(plans[1])


def test_restart_still_resumes_the_same_plan(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    staged(plan, tmp_path / "s")
    assert staged(plan, tmp_path / "s", restart=True).bytes_reused == plan.payload_bytes


def test_what_the_caller_added_before_a_kill_is_cleared(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    staged(plan, tmp_path / "s")
    (unit_dir(tmp_path / "s") / "manifest.json").write_text("{torn")
    staged(plan, tmp_path / "s")
    assert read_tree(unit_dir(tmp_path / "s")) == expected_files(plan)


def test_files_without_a_journal_are_not_trusted(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    unit = unit_dir(tmp_path / "s")
    unit.mkdir(parents=True)
    for target in plan.targets:
        (unit / target.path).write_bytes(b"\xff" * target.size)
    assert staged(plan, tmp_path / "s").bytes_reused == 0
    assert read_tree(unit) == expected_files(plan)


@pytest.mark.parametrize("damage", ["removed", "truncated", "longer"])
def test_a_finished_file_that_changed_is_done_again(tmp_path: Path, damage: str) -> None:
    """Twice: the run after the one that found it may not trust the old records either."""
    plan = small_plan(tmp_path)
    staged(plan, tmp_path / "s")
    path = unit_dir(tmp_path / "s") / "file-1"
    if damage == "removed":
        path.unlink()
    else:
        os.truncate(path, 10 if damage == "truncated" else path.stat().st_size + 10)
    stopped = Stop()
    stopped.request()
    with pytest.raises(Interrupted):
        execute(plan, tmp_path / "s", stop=stopped)
    path.write_bytes(b"\xff" * plan.targets[1].size)
    assert 0 < staged(plan, tmp_path / "s").bytes_reused < plan.payload_bytes
    assert read_tree(unit_dir(tmp_path / "s")) == expected_files(plan)
