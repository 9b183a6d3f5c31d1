"""Runs that end early, and the runs after them: the same bytes and digests."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glmconv.basics.errors import Interrupted, StorageError, UsageError
from glmconv.engine import Outcome, Progress, Stop, execute, unit_dir
from glmconv.engine.commit import Committer
from glmconv.plan.plan import Plan
from tests.support.engine_plans import expected_digests, expected_files, mixed_plan, read_tree

Mixed = tuple[Plan, dict[str, bytes]]
JOURNAL_BYTES = 1 << 20


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    plan = mixed_plan(tmp_path_factory.mktemp("sources"), seed=1)
    return plan, expected_files(plan)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


def check_complete(mixed: Mixed, staging: Path, outcome: Outcome) -> None:
    plan, files = mixed
    assert read_tree(unit_dir(staging)) == files
    assert outcome.leaves == expected_digests(plan, files)


def fail_writes_after(monkeypatch: pytest.MonkeyPatch, calls: int, act: Callable[[], None]) -> None:
    """Let ``act`` run before every write of data after the first ``calls``."""
    real, left = os.pwritev, [calls]

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        left[0] -= 1
        if left[0] < 0 and not os.readlink(f"/proc/self/fd/{fd}").endswith("journal"):
            act()
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


def test_a_stop_is_clean_and_the_next_run_resumes(
    mixed: Mixed, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    with monkeypatch.context() as patch:
        fail_writes_after(patch, 30, lambda: stop.request(signal.SIGTERM))
        with pytest.raises(Interrupted) as caught:
            execute(mixed[0], staging, stop=stop, journal_bytes=JOURNAL_BYTES)
    assert caught.value.exit_code == 143
    assert "resumes" in caught.value.hint
    outcome = execute(mixed[0], staging, journal_bytes=JOURNAL_BYTES)
    assert 0 < outcome.bytes_reused < mixed[0].payload_bytes
    check_complete(mixed, staging, outcome)


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EFBIG]
)
def test_a_failed_write_names_the_file_and_what_to_try(
    mixed: Mixed, staging: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        fail_writes_after(patch, 20, fail)
        with pytest.raises(StorageError, match=os.strerror(code)) as caught:
            execute(mixed[0], staging, journal_bytes=JOURNAL_BYTES)
    assert caught.value.where.startswith(os.fspath(unit_dir(staging)))
    assert caught.value.hint
    check_complete(mixed, staging, execute(mixed[0], staging))


def test_a_failed_flush_is_never_journalled(
    mixed: Mixed, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            execute(mixed[0], staging)
    assert (staging / "journal").read_bytes().count(b"\n") <= 1
    check_complete(mixed, staging, execute(mixed[0], staging))


def test_data_is_flushed_before_it_is_journalled(
    mixed: Mixed, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every record's file was flushed after the job's last write and before the record."""
    events: list[tuple[str, str]] = []
    flush, write, append = os.fdatasync, os.pwritev, os.write

    def name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def recording_flush(fd: int) -> None:
        flush(fd)
        events.append(("flush", name(fd)))

    def recording_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        events.append(("write", name(fd)))
        return write(fd, buffers, offset)

    def recording_append(fd: int, data: bytes) -> int:
        events.append(("write", name(fd)))
        return append(fd, data)

    monkeypatch.setattr(os, "fdatasync", recording_flush)
    monkeypatch.setattr(os, "write", recording_append)
    monkeypatch.setattr(os, "pwritev", recording_write)
    execute(mixed[0], staging, workers=1)
    journal = [index for index, event in enumerate(events) if event == ("write", "journal")]
    for target in mixed[0].targets:
        file = Path(target.path).name
        last_write = max(index for index, event in enumerate(events) if event == ("write", file))
        assert any(
            last_write < index < journal[-1] for index, event in enumerate(events) if event == ("flush", file)
        )


def test_progress_rises_to_the_total_and_counts_what_was_reused(mixed: Mixed, staging: Path) -> None:
    seen: list[Progress] = []
    execute(mixed[0], staging, progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total == mixed[0].payload_bytes
    execute(mixed[0], staging, progress=seen.append)
    assert seen[-1].reused == mixed[0].payload_bytes


def test_a_failing_progress_function_ends_the_run(mixed: Mixed, staging: Path) -> None:
    def broken(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(mixed[0], staging, progress=broken)
    check_complete(mixed, staging, execute(mixed[0], staging))


def test_an_error_in_the_committer_is_raised(
    mixed: Mixed, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Committer) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Committer, "_commit", broken)
    with pytest.raises(ZeroDivisionError):
        execute(mixed[0], staging)


def test_no_workers_is_a_usage_error(mixed: Mixed, staging: Path) -> None:
    with pytest.raises(UsageError):
        execute(mixed[0], staging, workers=0)


def test_an_empty_plan_is_done_at_once(staging: Path) -> None:
    outcome = execute(Plan([], [], digest="empty"), staging)
    assert outcome.leaves == {}
    assert read_tree(unit_dir(staging)) == {}


CHILD = """
import pickle, sys, time
from pathlib import Path
import glmconv.engine.copy as copy
from glmconv.engine import execute
write = copy.write_all
def slow_write(*args):
    time.sleep(0.002)
    write(*args)
copy.write_all = slow_write
plan, staging, workers, hash_mode = pickle.loads(Path(sys.argv[1]).read_bytes())
execute(plan, staging, workers=workers, hash_mode=hash_mode, journal_bytes=1 << 18)
"""


def kill_at(script: Path, journal: Path, lines: int) -> bool:
    """Run the child and kill it when the journal has more than ``lines`` lines; whether it was killed."""
    with subprocess.Popen([sys.executable, "-c", CHILD, script]) as process:
        while process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") > lines:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait() in (0, -signal.SIGKILL)
        return process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_moment_leave_the_same_bytes(mixed: Mixed, tmp_path: Path, seed: int) -> None:
    """Each run is killed up to three times at random places of the journal, then ends in peace."""
    rng = random.Random(seed)
    staging, script = tmp_path / "s", tmp_path / "plan"
    staging.mkdir()
    lines = kills = 0
    for _ in range(3):
        script.write_bytes(pickle.dumps((mixed[0], staging, rng.choice([1, 2, 3]), "full")))
        lines += rng.randrange(0, 5)
        kills += kill_at(script, staging / "journal", lines)
    assert kills
    outcome = execute(mixed[0], staging, workers=rng.choice([1, 2]), journal_bytes=JOURNAL_BYTES)
    check_complete(mixed, staging, outcome)
    assert outcome.bytes_reused > 0 or lines < 2
    assert outcome.bytes_reused < mixed[0].payload_bytes
