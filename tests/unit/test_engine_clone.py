"""The clone rung: what is shared, what is copied at its edges, and every way in which it can be refused.

The kernel's call is replaced by one with the same rules (aligned offsets, no range behind the end
of the source); the real call is tested on real filesystems in ``test_engine_mounts``.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import glmconv.engine.clone as clone_module
from glmconv.basics.errors import StorageError
from glmconv.engine import CopyMode, HashMode, clone_refusal, execute, unit_dir
from glmconv.plan.plan import Move, Plan
from glmconv.storage.local import LocalFile
from tests.support.engine_plans import Planner, expected_digests, expected_files, mixed_plan, read_tree

REFUSED = [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC, errno.ETXTBSY, errno.ENOTTY]


class FakeKernel:
    """FICLONERANGE by copying, refusing what the kernel refuses, and after ``limit`` calls everything."""

    def __init__(self, limit: int = 1 << 60, code: int = 0) -> None:
        self.calls: list[int] = []
        self.limit, self.code = limit, code

    def __call__(self, source_fd: int, source_offset: int, target_fd: int, offset: int, size: int) -> None:
        if len(self.calls) >= self.limit:
            raise OSError(self.code, os.strerror(self.code))
        aligned = source_offset % 4096 == offset % 4096 == size % 4096 == 0
        if not aligned or size == 0 or source_offset + size > os.fstat(source_fd).st_size:
            raise OSError(errno.EINVAL, "not aligned")
        self.calls.append(size)
        for start in range(0, size, 1 << 24):
            data = os.pread(source_fd, min(1 << 24, size - start), source_offset + start)
            os.pwrite(target_fd, data, offset + start)


def use(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel) -> FakeKernel:
    monkeypatch.setattr(clone_module, "clone_range", kernel)
    return kernel


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, dict[str, bytes]]:
    plan = mixed_plan(tmp_path_factory.mktemp("sources"), seed=2)
    return plan, expected_files(plan)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


@pytest.mark.parametrize("copy_mode", ["auto", "clone"])
@pytest.mark.parametrize("hash_mode", ["full", "none"])
def test_cloning_gives_the_same_bytes_and_digests(
    mixed: tuple[Plan, dict[str, bytes]],
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    copy_mode: CopyMode,
    hash_mode: HashMode,
) -> None:
    kernel = use(monkeypatch, FakeKernel())
    plan, files = mixed
    outcome = execute(plan, staging, copy_mode=copy_mode, hash_mode=hash_mode)
    assert read_tree(unit_dir(staging)) == files
    assert outcome.leaves == (expected_digests(plan, files) if hash_mode == "full" else {})
    assert outcome.bytes_cloned == sum(kernel.calls[1:])  # the first is the probe's
    assert outcome.bytes_cloned > 1 << 24
    assert outcome.clone_reason == ""


def aligned_plan(root: Path, payloads: int = 8, shift: int = 0) -> Planner:
    """Payloads at odd offsets, congruent or ``shift`` bytes off, a little over 2 MiB each."""
    planner = Planner(root)
    src = planner.source(payloads * (2 << 20) + (1 << 20))
    target = planner.target("file")
    for number in range(payloads):
        at, size = number * (2 << 20) + 100 * number + 8, (2 << 20) + 50
        residue = at + shift * (number % 2)
        planner.payload(target, size, [Move(src, at, 0, size)], residue=residue % 4096)
    return planner


def test_without_hashing_only_the_edges_are_read(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeKernel())
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counting(self: LocalFile, view: memoryview, offset: int) -> None:
        reads.append(len(view))
        read_into(self, view, offset)

    monkeypatch.setattr(LocalFile, "read_into", counting)
    plan = aligned_plan(tmp_path).plan()
    outcome = execute(plan, staging, hash_mode="none")
    assert sum(reads) <= 8 * 2 * 4096
    assert outcome.bytes_copied == sum(reads)
    assert read_tree(unit_dir(staging)) == expected_files(plan)


def test_with_hashing_every_byte_is_read_once(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeKernel())
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counting(self: LocalFile, view: memoryview, offset: int) -> None:
        reads.append(len(view))
        read_into(self, view, offset)

    monkeypatch.setattr(LocalFile, "read_into", counting)
    plan = aligned_plan(tmp_path).plan()
    execute(plan, staging)
    assert sum(reads) == plan.payload_bytes


def test_ranges_that_are_not_congruent_are_copied(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeKernel())
    plan = aligned_plan(tmp_path, shift=4).plan()
    outcome = execute(plan, staging, copy_mode="clone")
    assert 4 * (2 << 20) - 4 * 8192 < outcome.bytes_cloned < 4 * (2 << 20)
    assert read_tree(unit_dir(staging)) == expected_files(plan)


@pytest.mark.parametrize("code", REFUSED)
@pytest.mark.parametrize("after", [1, 4])
def test_a_refusal_halfway_falls_back_range_by_range(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch, code: int, after: int
) -> None:
    kernel = use(monkeypatch, FakeKernel(after, code))
    plan = aligned_plan(tmp_path).plan()
    outcome = execute(plan, staging, workers=1)
    files = expected_files(plan)
    assert read_tree(unit_dir(staging)) == files
    assert outcome.leaves == expected_digests(plan, files)
    assert outcome.bytes_cloned == sum(kernel.calls[1:])
    assert os.strerror(code) in outcome.clone_reason


def test_space_that_comes_back_is_cloned_into_again(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC is one range's: the allocation group of another file may have room."""
    kernel = use(monkeypatch, FakeKernel())
    plan = aligned_plan(tmp_path).plan()
    calls = [0]

    def sometimes(*args: int) -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        kernel(*args)

    monkeypatch.setattr(clone_module, "clone_range", sometimes)
    outcome = execute(plan, staging, workers=1)
    assert len(kernel.calls) == 1 + 4
    assert outcome.bytes_cloned == sum(kernel.calls[1:])
    assert read_tree(unit_dir(staging)) == expected_files(plan)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP])
def test_clone_mode_refuses_before_any_work_and_says_why(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    use(monkeypatch, FakeKernel(0, code))
    reason = {errno.EXDEV: "different filesystems", errno.EOPNOTSUPP: "cannot share extents"}[code]
    with pytest.raises(StorageError, match=reason) as caught:
        execute(aligned_plan(tmp_path).plan(), staging, copy_mode="clone")
    assert "--copy-mode auto" in caught.value.hint
    assert read_tree(unit_dir(staging)) == {}


def test_clone_mode_refused_halfway_is_an_error(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeKernel(3, errno.ENOSPC))
    with pytest.raises(StorageError, match=r"cannot clone from .*: No space left"):
        execute(aligned_plan(tmp_path).plan(), staging, copy_mode="clone")


def test_a_refused_offload_is_read_and_written(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_file_range gives up after one step: the rest of the range takes the last rung."""
    steps = [0]
    real = os.copy_file_range

    def once(src: int, dst: int, count: int, offset_src: int, offset_dst: int) -> int:
        steps[0] += 1
        if steps[0] > 1:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(src, dst, min(count, 12345), offset_src, offset_dst)

    use(monkeypatch, FakeKernel(0, errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "copy_file_range", once)
    plan = aligned_plan(tmp_path).plan()
    outcome = execute(plan, staging, workers=1, hash_mode="none")
    assert steps[0] == 2
    assert outcome.bytes_copied == plan.payload_bytes
    assert read_tree(unit_dir(staging)) == expected_files(plan)


def test_an_offload_that_fails_for_good_is_an_error(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    use(monkeypatch, FakeKernel(0, errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(StorageError, match="No space left"):
        execute(aligned_plan(tmp_path).plan(), staging, hash_mode="none")


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10_000))
    clone_refusal(tmp_path / "source", tmp_path)
    clone_refusal(None, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_probe_of_a_missing_directory_or_source_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        clone_refusal(None, tmp_path / "missing")
    with pytest.raises(StorageError):
        clone_refusal(tmp_path / "missing", tmp_path)
