"""The tests' tracer sees every call that changes files, and kills or fails the one that was chosen."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.support.fs_calls import Call
from tests.support.tracer import Orders, Refusal, traced


def work(folder: Path) -> int:
    """A bit of everything; an error ends it with its errno."""
    try:
        (folder / "sub").mkdir()
        fd = os.open(folder / "sub" / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.pwrite(fd, b"data", 0)
        os.ftruncate(fd, 2)
        os.fdatasync(fd)
        os.close(fd)
        os.close(os.open(folder / "sub" / "new", os.O_RDONLY))
        os.rename(folder / "sub" / "new", folder / "file")
        os.link(folder / "file", folder / "link")
        os.symlink("file", folder / "symlink")
        os.utime(folder / "file", (1, 1))
        os.chmod(folder / "file", 0o600)
        (folder / "link").unlink()
        (folder / "sub").rmdir()
        shutil.copyfile(folder / "file", folder / "copy")
    except OSError as error:
        return error.errno or 70
    return 0


NAMES = ["mkdir", "openat", "pwrite64", "ftruncate", "fdatasync", "rename", "link", "symlink"]
NAMES += ["utimensat", "chmod", "unlink", "rmdir", "openat", "sendfile"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "watched"
    path.mkdir()
    return path


def test_sees_every_change_and_nothing_else(folder: Path) -> None:
    done = traced(lambda: work(folder), Orders([str(folder)]))
    assert done.code == 0
    names = [call.name for call in done.calls]
    assert names[: len(NAMES)] == NAMES  # a copy may end with another call that finds no more bytes
    assert str(done.calls[5]) == "rename(/sub/new, /file)"


def test_sees_nothing_beside_what_is_watched(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert traced(lambda: work(folder), Orders([str(tmp_path / "other")])).calls == []


@pytest.mark.parametrize("number", range(1, len(NAMES) + 1))
def test_kills_before_the_chosen_call(folder: Path, number: int) -> None:
    done = traced(lambda: work(folder), Orders([str(folder)], kill=number))
    assert done.code == -signal.SIGKILL
    assert done.killed_at is not None
    assert done.killed_at.name == NAMES[number - 1]
    assert len(done.calls) == number
    there = [(folder / name).exists() for name in ("sub", "sub/new", "file", "link", "symlink", "copy")]
    expected = [1 < number < 13, 2 < number < 7, number > 6, 7 < number < 12, number > 8, number > 13]
    assert there == expected


def test_kills_before_the_chosen_one_of_several_alike(folder: Path) -> None:
    done = traced(lambda: work(folder), Orders([str(folder)], kill=1))
    assert done.killed_at == Call("mkdir", "/sub")

    def write() -> int:
        fd = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
        return sum(os.pwrite(fd, b"x", at) for at in range(9))

    done = traced(write, Orders([str(folder)], kill_at=(Call("pwrite64", "/file"), 4)))
    assert done.code == -signal.SIGKILL
    assert (folder / "file").read_bytes() == b"xxx"


def test_chosen_call_fails_unmade(folder: Path) -> None:
    done = traced(lambda: work(folder), Orders([str(folder)], fail=(6, errno.EIO)))
    assert done.code == errno.EIO
    assert (folder / "sub" / "new").exists()
    assert not (folder / "file").exists()


def test_refuses_some_calls_by_name(folder: Path) -> None:
    refusal = Refusal("openat", errno.ENOSPC, "copy")
    assert traced(lambda: work(folder), Orders([str(folder)], refusals=[refusal])).code == errno.ENOSPC


def test_order_of_threads_does_not_depend_on_the_scheduler(folder: Path) -> None:
    def write(name: str) -> None:
        for at in range(20):
            (folder / f"{name}{at}").write_bytes(b"x")

    def both() -> int:
        threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0

    seen = []
    for _ in range(3):
        done = traced(both, Orders([str(folder)]))
        assert done.code == 0
        seen.append([str(call) for call in done.calls])
        assert len(seen[-1]) == 120
    assert seen[0] == seen[1] == seen[2]


def test_shared_mapping_is_not_overlooked(folder: Path) -> None:
    import mmap

    def write() -> int:
        with (folder / "file").open("wb+") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096) as view:
                view[:4] = b"data"
        return 0

    with pytest.raises(RuntimeError, match=r"a shared mapping of .*file is written past"):
        traced(write, Orders([str(folder)]))
