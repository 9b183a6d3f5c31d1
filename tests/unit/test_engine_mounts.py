"""The engine on real filesystems that the tests mount themselves: XFS, btrfs, a full one, a read-only one.

Without the right to mount, or without the mkfs tools, these tests are skipped; in CI they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from glmconv.basics.errors import StorageError
from glmconv.engine import clone_refusal, destination, execute, unit_dir
from glmconv.plan.plan import Move, Plan
from tests.support.engine_plans import Planner, expected_digests, expected_files, mixed_plan, read_tree

pytestmark = pytest.mark.slow

MIB = 1 << 20


def unavailable(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        unavailable(f"cannot mount: {done.stderr.strip()}")


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def reflink(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh filesystem of 2 GiB that can share extents."""
    kind = request.param
    if shutil.which(f"mkfs.{kind}") is None:
        unavailable(f"mkfs.{kind} is not installed")
    root = tmp_path_factory.mktemp(kind)
    image, point = root / "image", root / "mounted"
    point.mkdir()
    with open(image, "wb") as file:
        file.truncate(2048 * MIB)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True)
    mount("-o", "loop", image, point)
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.fixture
def folder(reflink: Path) -> Iterator[Path]:
    path = reflink / "test"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def free_bytes(path: Path) -> int:
    os.sync()
    stat = os.statvfs(path)
    return stat.f_bfree * stat.f_frsize


def staged(plan: Plan, root: Path, name: str, **options: object) -> tuple[dict[str, bytes], int]:
    """The output of a run, and the bytes it cloned."""
    (root / name).mkdir()
    outcome = execute(plan, root / name, **options)  # type: ignore[arg-type]
    return read_tree(unit_dir(root / name)), outcome.bytes_cloned


def test_every_mode_writes_the_same_bytes(folder: Path) -> None:
    plan = mixed_plan(folder)
    files = expected_files(plan)
    modes: dict[str, dict[str, object]] = {
        "clone": {"copy_mode": "clone", "hash_mode": "none", "workers": 3},
        "auto": {"copy_mode": "auto", "hash_mode": "full"},
        "copy": {"copy_mode": "copy", "hash_mode": "none"},
    }
    for name, options in modes.items():
        found, cloned = staged(plan, folder, name, **options)
        assert found == files
        assert (cloned > 0) == (name != "copy")


def test_a_clone_costs_next_to_no_space_and_hashes_alike(folder: Path) -> None:
    planner = Planner(folder)
    src = planner.source(200 * MIB)
    target = planner.target("file")
    for number in range(10):
        planner.straight(target, src, number * 20 * MIB + 11, 20 * MIB - 11)
    plan = planner.plan()
    before = free_bytes(folder)
    (folder / "s").mkdir()
    outcome = execute(plan, folder / "s")
    assert before - free_bytes(folder) < 200 * MIB * 0.02
    assert outcome.bytes_cloned > 199 * MIB
    files = read_tree(unit_dir(folder / "s"))
    assert files == expected_files(plan)
    assert outcome.leaves == expected_digests(plan, files)


def test_holes_are_cloned_as_holes(folder: Path) -> None:
    path = folder / "sparse"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 39) + 5000)
        file.write(b"data")
    planner = Planner(folder)
    src = planner.adopt(path)
    payload = planner.payload(planner.target("file"), 1 << 39, [Move(src, 1 << 39, 0, 1 << 39)], residue=0)
    before = free_bytes(folder)
    (folder / "s").mkdir()
    execute(planner.plan(), folder / "s")
    assert before - free_bytes(folder) < 4 * MIB
    with open(unit_dir(folder / "s") / "file", "rb") as file:
        assert os.pread(file.fileno(), 4, payload.offset + 5000) == b"data"


def test_a_stopped_clone_resumes(folder: Path) -> None:
    plan = mixed_plan(folder)
    (folder / "s").mkdir()
    options = {"copy_mode": "clone", "hash_mode": "none", "journal_bytes": 1 << 18}
    execute(plan, folder / "s", **options)  # type: ignore[arg-type]
    journal = folder / "s" / "journal"
    os.truncate(journal, journal.stat().st_size // 2)
    outcome = execute(plan, folder / "s", **options)  # type: ignore[arg-type]
    assert 0 < outcome.bytes_reused < plan.payload_bytes
    assert read_tree(unit_dir(folder / "s")) == expected_files(plan)


def test_the_probe_says_yes_here_and_why_not_across(folder: Path, tmp_path: Path) -> None:
    (folder / "source").write_bytes(bytes(10_000))
    assert clone_refusal(folder / "source", folder) is None
    assert clone_refusal(None, folder) is None
    assert clone_refusal(folder / "source", tmp_path) == "source and destination are on different filesystems"
    (tmp_path / "s").mkdir()
    plan = mixed_plan(folder)
    with pytest.raises(StorageError, match="different filesystems"):
        execute(plan, tmp_path / "s", copy_mode="clone")
    outcome = execute(plan, tmp_path / "s")
    assert outcome.bytes_cloned == 0
    assert "different filesystems" in outcome.clone_reason
    assert read_tree(unit_dir(tmp_path / "s")) == expected_files(plan)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem in memory of 24 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", point)
    yield point
    subprocess.run(["umount", point], check=True)


def test_a_full_disk_is_said_and_the_run_resumes_when_there_is_space(small: Path, tmp_path: Path) -> None:
    plan = mixed_plan(tmp_path)
    place = destination(small / "out", "release")
    place.prepare()
    with pytest.raises(StorageError, match="No space left") as caught:
        execute(plan, place.staging, journal_bytes=MIB)
    assert "free space" in caught.value.hint
    assert not place.final.exists()
    mount("-o", "remount,size=200m", small)
    outcome = execute(plan, place.staging, journal_bytes=MIB)
    assert outcome.bytes_reused > 0
    assert read_tree(unit_dir(place.staging)) == expected_files(plan)


def test_a_read_only_place_is_refused_before_any_work(small: Path) -> None:
    mount("-o", "remount,ro", small)
    with pytest.raises(StorageError, match="Read-only file system"):
        destination(small / "out", None).prepare()
