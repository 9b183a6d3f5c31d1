"""Nothing appears before it is complete, nothing is deleted without being asked, one rename publishes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glmconv.engine import (
    Destination,
    destination,
    discard,
    publish,
    require_space,
    unit_dir,
    write_atomically,
    write_tracker,
)
from glmconv.errors import StorageError, UsageError


def stage(place: Destination, text: str = "new") -> None:
    """A finished unit, with the journal and lock that are not published."""
    unit = unit_dir(place.staging)
    (unit / "hf").mkdir(parents=True)
    (unit / ".metadata").write_text(text)
    (unit / "hf" / "config.json").write_text("{}")
    (place.staging / "journal").write_text("")
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
    publish(place.staging, place.final)
    write_tracker(place.dst, "release")
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
    publish(place.staging, place.final)
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
    publish(place.staging, place.final)
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
    publish(place.staging, place.final, overwrite=True)
    assert names(place.final) == {".metadata", "hf", "hf/config.json"}
    assert not place.staging.exists()


def test_overwrite_spares_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="does not look like a checkpoint"):
        destination(tmp_path / "home", None, overwrite=True)


def test_a_failed_rename_keeps_old_and_new_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            publish(place.staging, place.final, overwrite=True)
    assert (place.staging / "old" / "config.json").read_text() == "old"
    again = destination(tmp_path / "out", None)
    publish(again.staging, again.final)
    assert (tmp_path / "out" / ".metadata").read_text() == "new"
    assert not again.staging.exists()


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


def test_discard_removes_all_and_may_be_repeated(tmp_path: Path) -> None:
    place = destination(tmp_path / "out", "release")
    stage(place)
    discard(place.staging)
    discard(place.staging)
    assert names(tmp_path) == set()


def test_a_small_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "latest", b"old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left"):
            write_atomically(tmp_path / "latest", b"new")
    assert names(tmp_path) == {"latest"}
    assert (tmp_path / "latest").read_bytes() == b"old"
    write_atomically(tmp_path / "latest", b"new")
    assert (tmp_path / "latest").read_bytes() == b"new"
