"""The tests' network filesystem has the manners that it says it has."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network import Fault, Network, mounted_network

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with mounted_network(tmp_path_factory.mktemp("fuse")) as network:
        yield network


@pytest.fixture
def network(shared: Network) -> Network:
    shared.calm()
    return shared


@pytest.fixture
def folder(network: Network, request: pytest.FixtureRequest) -> Path:
    path = network.path / str(request.node.name)
    path.mkdir()
    return path


def gone(path: Path) -> bool:
    """A close tells the server a little later."""
    deadline = time.monotonic() + 5
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def exchange(left: Path, right: Path) -> int:
    """``renameat2`` with RENAME_EXCHANGE: 0, or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(-100, os.fsencode(left), -100, os.fsencode(right), 2)
    return ctypes.get_errno() if done else 0


def test_holds_what_is_written(folder: Path, network: Network) -> None:
    (folder / "file").write_bytes(b"some bytes")
    (folder / "file").rename(folder / "other")
    assert (folder / "other").read_bytes() == b"some bytes"
    assert os.listdir(network.backing / folder.name) == ["other"]


def test_open_file_outlives_its_name_in_the_directory(folder: Path, network: Network) -> None:
    with (folder / "file").open("wb") as file:
        (folder / "file").unlink()
        (left,) = os.listdir(folder)
        assert left.startswith(".nfs")
        with pytest.raises(OSError, match="not empty"):
            folder.rmdir()
        with pytest.raises(OSError, match="busy"):
            (folder / left).unlink()
        file.write(b"still here")
        file.flush()
        os.ftruncate(file.fileno(), 5)
        assert os.fstat(file.fileno()).st_size == 5
    assert gone(folder / left)
    folder.rmdir()
    assert network.calls()["silly rename"] == 1


def test_rename_over_an_open_file_keeps_it_too(folder: Path) -> None:
    (folder / "new").write_bytes(b"new")
    with (folder / "file").open("wb+") as file:
        file.write(b"old")
        file.flush()
        (folder / "new").rename(folder / "file")
        assert (folder / "file").read_bytes() == b"new"
        assert os.pread(file.fileno(), 10, 0) == b"old"
        (left,) = {*os.listdir(folder)} - {"file"}
    assert gone(folder / left)


def test_no_locks(folder: Path) -> None:
    with (folder / "file").open("wb") as file, pytest.raises(OSError, match="No locks") as caught:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert caught.value.errno == errno.ENOLCK


def test_locks_where_they_are_asked_for(tmp_path: Path) -> None:
    with mounted_network(tmp_path, locks=True) as network:
        (network.path / "file").touch()
        with (network.path / "file").open() as one, (network.path / "file").open() as two:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(BlockingIOError):
                fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_exchange_and_no_flush_of_directories(folder: Path) -> None:
    (folder / "left").mkdir()
    (folder / "right").mkdir()
    assert exchange(folder / "left", folder / "right") == errno.EINVAL
    fd = os.open(folder, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_chosen_call_fails(folder: Path, network: Network, number: int) -> None:
    network.arm(Fault("write", "*/file", number, after=1, times=1))
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, b"one", 0)
        with pytest.raises(OSError, match=os.strerror(number)):
            os.pwrite(fd, b"two", 3)
        os.pwrite(fd, b"two", 3)
        assert os.pread(fd, 10, 0) == b"onetwo"
    finally:
        os.close(fd)
    assert network.calls()["write:failed"] == 1


def test_fewer_bytes_and_late(folder: Path, network: Network) -> None:
    network.arm(Fault("write", most=3), Fault("read", most=2), Fault("mkdir", delay=0.2))
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert os.pwrite(fd, b"abcdef", 0) == 3
        assert os.pread(fd, 10, 0) == b"ab"
    finally:
        os.close(fd)
    began = time.monotonic()
    (folder / "new").mkdir()
    assert time.monotonic() - began > 0.19
