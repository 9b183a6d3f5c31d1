"""A filesystem for tests that has the manners of a network filesystem, over a folder of a local one.

- A file that is removed, or renamed over, while it is open stays in its directory as ``.nfsXXXX`` until
  the last close, and a directory that holds one is not empty (the NFS client's silly rename; libfuse
  does the same by the name ``.fuse_hiddenXXXX``, which is written as ``.nfsXXXX`` here).
- ``flock`` says ENOLCK where it is mounted without locks; names cannot be exchanged (EINVAL).
- Calls can be made to fail, to be slow, or to move fewer bytes than asked: real system calls then do.

``network.mounted_network`` mounts one; it needs root, ``/dev/fuse`` and libfuse 3. The process that serves
it is this module itself (``python -m tests.support.fuse_fs``), told what to do by lines of JSON.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import json
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.network import Fault

ROOT = Path(__file__).resolve().parents[2]
SILLY, HIDDEN = ".nfs", ".fuse_hidden"
STAT_FIELDS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")


@dataclass(frozen=True, slots=True)
class _Open:
    fd: int
    inode: tuple[int, int]


@dataclass(slots=True)
class _Faults:
    """Armed faults and counts, shared by the threads that serve calls."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    armed: list[Fault] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def arm(self, faults: list[Fault]) -> None:
        with self.lock:
            self.armed, self.seen, self.counts = faults, [0] * len(faults), Counter()

    def meet(self, op: str, path: str, size: int = 0) -> int:
        """Suffer what is armed for a call; returns the bytes it may move. OSError when it is to fail."""
        hits = []
        with self.lock:
            self.counts[op] += 1
            for at, fault in enumerate(self.armed):
                if fault.op == op and fnmatch.fnmatch(path or "", fault.path):
                    self.seen[at] += 1
                    if fault.after < self.seen[at] <= fault.after + fault.times:
                        hits.append(fault)
            if any(fault.errno for fault in hits):
                self.counts[f"{op}:failed"] += 1
        for fault in hits:
            time.sleep(fault.delay)
            if fault.errno:
                raise OSError(fault.errno, os.strerror(fault.errno))
            size = min(size, fault.most or size)
        return size


class Silly:
    """The operations, in the names that the FUSE library calls them by; paths begin with a slash."""

    use_ns = True

    def __init__(self, backing: str, locks: bool) -> None:
        self._backing, self._locks = backing, locks
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._next = 1
        self.faults = _Faults()

    def _real(self, path: str) -> str:
        return self._backing + path.replace(f"/{HIDDEN}", f"/{SILLY}")

    def _add(self, fd: int) -> int:
        stat = os.fstat(fd)
        with self._lock:
            self._next += 1
            self._open[self._next] = _Open(fd, (stat.st_dev, stat.st_ino))
            return self._next

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self.faults.meet("getattr", path)
        stat = os.fstat(self._open[fh].fd) if fh else os.lstat(self._real(path))
        times = {f"st_{name}": getattr(stat, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return {name: getattr(stat, name) for name in STAT_FIELDS} | times

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        name = path
        self.faults.meet("readdir", name)
        entries = [
            (".", name),
            ("..", name),
            *((one, f"{name}/{one}") for one in os.listdir(self._real(name))),
        ]
        stats = [(one, os.lstat(self._real(at))) for one, at in entries]
        return [(one, {"st_mode": stat.st_mode, "st_ino": stat.st_ino}, 0) for one, stat in stats]

    def opendir(self, path: str) -> int:
        self.faults.meet("opendir", path)
        return self._add(os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY))

    def releasedir(self, path: str, fh: int) -> int:
        return self.release(path, fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.faults.meet("fsyncdir", path)
        raise OSError(errno.EINVAL, "no fsync of directories")

    def open(self, path: str, flags: int) -> int:
        self.faults.meet("open", path)
        return self._add(os.open(self._real(path), flags & ~os.O_NOFOLLOW))

    def create(self, path: str, mode: int, flags: int) -> int:
        self.faults.meet("create", path)
        return self._add(os.open(self._real(path), flags | os.O_CREAT, mode))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        size = self.faults.meet("read", path, size)
        return os.pread(self._open[fh].fd, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        size = self.faults.meet("write", path, len(data))
        return os.pwrite(self._open[fh].fd, data[:size], offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self.faults.meet("truncate", path)
        os.truncate(self._open[fh].fd if fh else self._real(path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        self.faults.meet("flush", path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.faults.meet("fsync", path)
        os.fsync(self._open[fh].fd)
        return 0

    def release(self, path: str, fh: int) -> int:
        with self._lock:
            os.close(self._open.pop(fh).fd)
        return 0

    def flock(self, path: str, fh: int, op: int) -> int:
        self.faults.meet("flock", path)
        if not self._locks:
            raise OSError(errno.ENOLCK, "no locks")
        # Never wait here: the server would wait for a call that it has to serve itself.
        fcntl.flock(self._open[fh].fd, op | fcntl.LOCK_NB)
        return 0

    def unlink(self, path: str) -> int:
        self.faults.meet("unlink", path)
        if os.path.basename(path).startswith(SILLY) and self._is_open(path):
            raise OSError(errno.EBUSY, "still open")
        os.unlink(self._real(path))
        return 0

    def _is_open(self, path: str) -> bool:
        stat = os.lstat(self._real(path))
        with self._lock:
            return any(one.inode == (stat.st_dev, stat.st_ino) for one in self._open.values())

    def rename(self, old: str, new: str) -> int:
        self.faults.meet("silly rename" if os.path.basename(new).startswith(HIDDEN) else "rename", new)
        os.rename(self._real(old), self._real(new))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self.faults.meet("mkdir", path)
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        self.faults.meet("rmdir", path)
        os.rmdir(self._real(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        self.faults.meet("symlink", target)
        os.symlink(source, self._real(target))
        return 0

    def link(self, target: str, source: str) -> int:
        self.faults.meet("link", target)
        os.link(self._real(source), self._real(target), follow_symlinks=False)
        return 0

    def readlink(self, path: str) -> str:
        self.faults.meet("readlink", path)
        return os.readlink(self._real(path))

    def chmod(self, path: str, mode: int) -> int:
        self.faults.meet("chmod", path)
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        self.faults.meet("chown", path)
        os.chown(self._real(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None) -> int:
        self.faults.meet("utimens", path)
        real = self._real(path)
        if times is None:
            os.utime(real, follow_symlinks=False)
        else:
            os.utime(real, ns=times, follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        self.faults.meet("statfs", path)
        stat = os.statvfs(self._real(path))
        return {name: getattr(stat, name) for name in dir(stat) if name.startswith("f_")}

    def destroy(self, path: str) -> None:
        """Nothing is kept that would have to be put away."""


def _obey(filesystem: Silly) -> None:
    """Take orders from the test, a line each, and answer each."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = True
        if "arm" in request:
            filesystem.faults.arm([Fault(**one) for one in request["arm"]])
        else:
            with filesystem.faults.lock:
                answer = dict(filesystem.faults.counts)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _serve(backing: str, point: str, locks: bool) -> None:
    from mfusepy import FUSE  # loads libfuse: only where a filesystem is served

    class Server(FUSE):  # type: ignore[misc]
        """What the library leaves out: the flags of a rename, the open file of a truncation, an
        unlock at the close of a file without a name."""

        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            if flags:
                raise OSError(errno.EINVAL, "no exchange of names")
            return int(self.operations.rename(os.fsdecode(old), os.fsdecode(new)))

        def truncate_fuse_3(self, path: bytes, length: int, handle: Any) -> int:
            fh = handle.contents.fh if handle else None
            return int(self.operations.truncate(os.fsdecode(path), length, fh))

        def flock(self, path: bytes | None, handle: Any, op: int) -> int:
            return int(
                self.operations.flock("" if path is None else os.fsdecode(path), handle.contents.fh, op)
            )

    filesystem = Silly(backing, locks)
    threading.Thread(target=_obey, args=(filesystem,), daemon=True).start()
    # The kernel keeps nothing: every call of a test comes here, and short reads reach the caller.
    never = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    Server(
        filesystem,
        point,
        foreground=True,
        use_ino=True,
        direct_io=True,
        fsname="glmconv-tests",
        **never,
    )


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], "locks" in sys.argv[3:])
