"""Nothing appears before it is complete, nothing is deleted without being asked, one rename publishes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from glmconv.basics.errors import StorageError, UsageError
from glmconv.engine import (
    Destination,
    clean_up,
    publish,
    read_tracker,
    recognise,
    reopen,
    require_space,
    restore_old,
    set_tracker,
    unit_dir,
    write_atomically,
)
from glmconv.engine import destination as destination_of
from glmconv.engine.journal import open_journal
from glmconv.engine.publishing import State
from glmconv.plan.plan import Plan


def destination(
    dst: Path, unit: str | None, *, sources: Sequence[Path] = (), overwrite: bool = False
) -> Destination:
    """A destination that was looked at and prepared; ``thesis.tex`` is no checkpoint's own."""

    def foreign(path: Path) -> list[Path]:
        return [found.relative_to(path) for found in path.rglob("thesis.tex")]

    place = destination_of(dst, unit, sources=sources, overwrite=overwrite, foreign=foreign)
    place.check_final()
    place.prepare()
    return place


def finish(place: Destination) -> None:
    publish(place)
    finish_up(place)


def finish_up(place: Destination) -> None:
    clean_up(place.staging)
    (place.staging / "lock").unlink()
    place.staging.rmdir()


def stage(place: Destination, text: str = "new") -> None:
    """A finished unit, with the journal and lock that are not published."""
    unit = unit_dir(place.staging)
    (unit / "hf").mkdir(parents=True)
    (unit / ".metadata").write_text(text)
    (unit / "hf" / "config.json").write_text("{}")
    journal, _ = open_journal(place.staging / "journal", Plan([], [], digest="plan"), "full")
    journal.run = "this run"
    journal.begin(Plan([], [], digest="plan"), "full")
    journal.close()
    (place.staging / "lock").write_text("")


def old_unit(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("old")
    return path


def names(path: Path) -> set[str]:
    return {os.fspath(found.relative_to(path)) for found in path.rglob("*")}


def test_a_new_root_is_staged_beside_it(tmp_path: Path) -> None:
    place = destination(tmp_path / "out", "release")
    assert place.staging == tmp_path / ".out.glmconv-release.partial"
    assert place.final == tmp_path / "out" / "release"
    assert not (tmp_path / "out").exists()
    stage(place)
    publish(place)
    set_tracker(place.dst, "release", place.staging)
    finish_up(place)
    assert names(tmp_path / "out") == {
        "release",
        "release/.metadata",
        "release/hf",
        "release/hf/config.json",
        "latest_checkpointed_iteration.txt",
    }
    assert names(tmp_path) == {"out"} | {f"out/{name}" for name in names(tmp_path / "out")}


def test_an_existing_root_is_staged_inside_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    place = destination(tmp_path / "out", "iter_0000010")
    assert place.staging == tmp_path / "out" / ".glmconv-iter_0000010.partial"
    stage(place)
    finish(place)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"iter_0000010"}


def test_a_root_that_appeared_after_a_kill_keeps_its_staging(tmp_path: Path) -> None:
    place = destination(tmp_path / "out", "release")
    (tmp_path / "out").mkdir()
    assert destination(tmp_path / "out", "release").staging == place.staging


@pytest.mark.parametrize("exists", [False, True])
def test_a_unit_that_is_the_destination_itself(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "out").mkdir()
    place = destination(tmp_path / "out", None)
    assert place.staging == tmp_path / ".out.glmconv-hf.partial"
    stage(place)
    finish(place)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert (tmp_path / "out" / ".metadata").read_text() == "new"


@pytest.mark.parametrize("unit", [None, "release"])
def test_an_existing_unit_is_refused(tmp_path: Path, unit: str | None) -> None:
    old = old_unit(tmp_path / "out" / (unit or ""))
    with pytest.raises(StorageError, match="exists already") as caught:
        destination(tmp_path / "out", unit)
    assert "--overwrite" in caught.value.hint
    assert names(tmp_path / "out") == {"config.json"} if unit is None else old.exists()


@pytest.mark.parametrize("unit", [None, "release"])
def test_overwrite_replaces_the_unit_at_the_end(tmp_path: Path, unit: str | None) -> None:
    old = old_unit(tmp_path / "out" / (unit or ""))
    place = destination(tmp_path / "out", unit, overwrite=True)
    stage(place)
    assert (old / "config.json").read_text() == "old"
    finish(place)
    assert names(place.final) == {".metadata", "hf", "hf/config.json"}
    assert not place.staging.exists()


def test_overwrite_spares_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="not a checkpoint's own") as caught:
        destination(tmp_path / "home", None, overwrite=True)
    assert "thesis.tex" in str(caught.value)
    assert names(tmp_path) == {"home", "home/thesis.tex"}


def test_what_appears_in_the_old_unit_during_the_work_is_spared_too(tmp_path: Path) -> None:
    old = old_unit(tmp_path / "out")
    place = destination(tmp_path / "out", None, overwrite=True)
    stage(place)
    (old / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="not a checkpoint's own"):
        publish(place)
    assert names(old) == {"config.json", "thesis.tex"}


def without_exchange(left: Path, right: Path) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_without_an_exchange_a_failed_rename_keeps_old_and_new_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[publish.__module__], "_exchange", without_exchange)
    old_unit(tmp_path / "out")
    place = destination(tmp_path / "out", None, overwrite=True)
    stage(place)
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if self == unit_dir(place.staging):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        with pytest.raises(StorageError, match="cannot publish"):
            publish(place)
    assert (place.staging / "old" / "config.json").read_text() == "old"
    again = destination(tmp_path / "out", None, overwrite=True)
    restore_old(again)
    assert names(tmp_path / "out") == {"config.json"}
    reopen(again, "this run")
    finish(again)
    assert (tmp_path / "out" / ".metadata").read_text() == "new"
    assert not again.staging.exists()


def test_an_exchange_leaves_no_moment_without_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_unit(tmp_path / "out")
    place = destination(tmp_path / "out", None, overwrite=True)
    stage(place)
    rename, renamed = Path.rename, []

    def record(self: Path, target: Path) -> Path:
        renamed.append((self.name, target.name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", record)
    publish(place)
    assert renamed == [("journal", "published")]
    assert (tmp_path / "out" / ".metadata").read_text() == "new"
    assert (unit_dir(place.staging) / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("before", "unit", "after"),
    [
        (None, "release", "release"),
        (None, "7", "7"),
        ("6", "7", "7"),
        ("7", "7", "7"),
        ("5000", "7", "5000"),
        ("5000", "release", "5000"),
        ("release", "7", "release"),
        ("who knows", "7", "who knows"),
        ("", "release", ""),
    ],
)
def test_a_tracker_moves_forward_only(tmp_path: Path, before: str | None, unit: str, after: str) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    if before is not None:
        path.write_text(before)
    tracked = set_tracker(tmp_path, unit, tmp_path)
    assert (tracked.moved, read_tracker(path)) == (after == unit, after)
    assert tracked.kept == ("" if tracked.moved else after)
    assert set_tracker(tmp_path, unit, tmp_path, force=True).moved
    assert path.read_text() == unit


MANIFEST = {"plan_digest": "plan", "run": "this run", "hash": {"mode": "full"}}


class TestStates:
    """Every state that a kill leaves, told apart by run and plan."""

    @staticmethod
    def of(place: Destination, *, run: str | None, name: str = "journal", plan: str = "plan") -> State:
        if run is not None:
            journal, _ = open_journal(place.staging / name, Plan([], [], digest=plan), "full")
            journal.run = run
            journal.begin(Plan([], [], digest=plan), "full")
            journal.close()
        return recognise(place, "plan", "full", MANIFEST)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_run_that_put_its_unit_in_place_is_to_be_finished(
        self, tmp_path: Path, overwrite: bool
    ) -> None:
        place = destination(tmp_path / "out", None, overwrite=overwrite)
        assert self.of(place, run="this run", name="published") is State.PUBLISHED

    def test_what_a_new_unit_replaced_is_never_taken_for_it(self, tmp_path: Path) -> None:
        place = destination(tmp_path / "out", None, overwrite=True)
        for staged in (None, "the run of the old unit"):
            self.of(place, run="this run", name="published")
            reopen(place, staged)
            assert not any((place.staging / name).exists() for name in ("journal", "published"))
        self.of(place, run="this run", name="published")
        reopen(place, "this run")
        assert (place.staging / "journal").exists()

    def test_an_old_unit_of_the_same_plan_is_not_the_new_one(self, tmp_path: Path) -> None:
        place = destination(tmp_path / "out", None, overwrite=True)
        assert self.of(place, run="a later run") is State.OPEN

    def test_another_plan_is_never_finished(self, tmp_path: Path) -> None:
        place = destination(tmp_path / "out", None)
        assert self.of(place, run="this run", plan="another") is State.OPEN
        assert recognise(place, "another", "full", MANIFEST) is State.OPEN
        assert recognise(place, "plan", "none", MANIFEST) is State.OPEN
        assert recognise(place, "plan", "full", None) is State.OPEN

    def test_an_empty_staging_directory_is_the_last_thing_to_go(self, tmp_path: Path) -> None:
        assert self.of(destination(tmp_path / "a", None), run=None) is State.PUBLISHED
        assert self.of(destination(tmp_path / "b", None, overwrite=True), run=None) is State.OPEN
        gone = destination(tmp_path / "c", None)
        gone.staging.rmdir()
        assert self.of(gone, run=None) is State.OPEN


@pytest.mark.parametrize(
    ("src", "dst"),
    [("m", "m"), ("m", "m/out"), ("m", "m/a/../out/deep"), ("m/hf", "m"), ("m", "link"), ("m", "link/out")],
)
def test_nested_source_and_destination_are_refused(tmp_path: Path, src: str, dst: str) -> None:
    (tmp_path / "m" / "hf").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "m")
    with pytest.raises(UsageError, match=r"source"):
        destination(tmp_path / dst, "release", sources=[tmp_path / src], overwrite=True)
    assert names(tmp_path) == {"m", "m/hf", "link"}


def test_neighbours_with_a_common_prefix_are_fine(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    destination(tmp_path / "model-out", "release", sources=[tmp_path / "model"])


@pytest.mark.parametrize("dst", ["file", "file/out"])
def test_a_file_in_the_way_is_a_storage_error(tmp_path: Path, dst: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        destination(tmp_path / dst, "release")


def test_an_unwritable_place_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only filesystem says so at the first mkdir (a superuser passes mere permissions)."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system", os.fspath(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="Read-only") as caught:
        destination(tmp_path / "out", "release")
    assert caught.value.hint == "choose a destination on a writable filesystem"


def test_a_mount_point_cannot_be_the_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(StorageError, match="mount point"):
        destination(tmp_path / "out", None)
    destination(tmp_path / "out", "release")


def test_space_is_asked_of_the_nearest_existing_directory(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(StorageError, match="are needed and") as caught:
        require_space(tmp_path / "not" / "yet", 1 << 60)
    assert caught.value.where == os.fspath(tmp_path)


def test_cleaning_up_leaves_the_lock_and_may_be_repeated(tmp_path: Path) -> None:
    place = destination(tmp_path / "out", "release")
    stage(place)
    (place.staging / ".nfs0001").write_text("a file that somebody still holds open")
    clean_up(place.staging)
    clean_up(place.staging)
    assert names(place.staging) == {"lock", ".nfs0001"}


def test_a_small_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "latest", b"old", tmp_path / "new")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left"):
            write_atomically(tmp_path / "latest", b"new", tmp_path / "new")
    assert names(tmp_path) == {"latest"}
    assert (tmp_path / "latest").read_bytes() == b"old"
    write_atomically(tmp_path / "latest", b"new", tmp_path / "new")
    assert (tmp_path / "latest").read_bytes() == b"new"
