"""One conversion at a time at a destination; a dead one does not block the next."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import glmconv.engine.lock as lock_module
from glmconv.basics.errors import StorageError
from glmconv.engine import StagingLock

HOLD = """
import sys, time
from pathlib import Path
from glmconv.engine import StagingLock
with StagingLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def claim(staging: Path, **holder: object) -> None:
    """The text that a holder left, as if its process had ended without a word."""
    (staging / "lock").write_text(json.dumps(holder))


def test_a_second_conversion_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with StagingLock(tmp_path), pytest.raises(StorageError, match="busy") as caught, StagingLock(tmp_path):
        pass
    assert caught.value.exit_code == 3
    assert f"process {os.getpid()} on " in str(caught.value)


def test_it_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(3):
        with StagingLock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        assert (tmp_path / "lock").read_text() == ""


def test_a_killed_holder_does_not_block(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=f"process {process.pid} on"), StagingLock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with StagingLock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_holder_on_another_host_is_believed_until_its_lease_ends(tmp_path: Path) -> None:
    claim(tmp_path, host="node7", pid=12, started="noon", boot="another kernel")
    with pytest.raises(StorageError, match="process 12 on node7, started noon"), StagingLock(tmp_path):
        pass
    old = time.time() - 1000
    os.utime(tmp_path / "lock", (old, old))
    with StagingLock(tmp_path):
        pass


def test_the_heartbeat_renews_the_lease_and_keeps_the_text(tmp_path: Path) -> None:
    with StagingLock(tmp_path, heartbeat=0.01):
        os.utime(tmp_path / "lock", (1, 1))
        text = (tmp_path / "lock").read_text()
        deadline = time.monotonic() + 5
        while (tmp_path / "lock").stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "lock").stat().st_mtime > 2
        assert (tmp_path / "lock").read_text() == text


def test_a_lock_file_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the open and the lock, the run before ended and removed its staging directory's files."""
    flock = fcntl.flock
    calls: list[int] = []

    def late(fd: int, operation: int) -> None:
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with StagingLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert len(calls) == 2


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock_module, "SETTLE", 0.01)


@pytest.mark.usefixtures("no_flock")
def test_without_locks_a_living_process_of_this_host_is_seen(tmp_path: Path) -> None:
    with (
        StagingLock(tmp_path),
        pytest.raises(StorageError, match="its process is alive"),
        StagingLock(tmp_path),
    ):
        pass


@pytest.mark.usefixtures("no_flock")
def test_without_locks_a_dead_process_of_this_host_is_passed_over(tmp_path: Path) -> None:
    boot = lock_module._boot_id()
    claim(tmp_path, host="here", pid=os.getpid(), started="before", boot=boot, ticks="the pid was another's")
    with StagingLock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{torn", "[]", "\0\0"])
def test_a_torn_text_has_no_holder(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    with StagingLock(tmp_path):
        pass
