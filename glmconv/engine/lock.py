"""One conversion at a time in a staging directory.

``flock`` tells on one host, and on network filesystems that carry it, whether the holder lives: a
dead one's lock is free at once. Where locks do not reach another host, its lease does: a holder
touches the file every half minute, and one that has not for minutes is taken for dead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from glmconv.engine.files import storage_error
from glmconv.errors import StorageError

HEARTBEAT = 30.0
SETTLE = 0.5
"""Seconds in which two claims on a filesystem without locks would meet; the last writer wins."""

LEASE = 240.0
"""Seconds without a heartbeat after which a holder on another host is taken for dead."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def _boot_id() -> str:
    """Tells this running kernel from any other, whatever the containers on it are called."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def _start_ticks(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty when there is none with this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


class StagingLock:
    """Holds a staging directory for this process while the ``with`` block runs.

    Entering raises StorageError that names the holder when the directory is in use.
    """

    def __init__(self, staging: Path, *, heartbeat: float = HEARTBEAT, lease: float = LEASE) -> None:
        self._path = staging / "lock"
        self._heartbeat = heartbeat
        self._lease = lease
        self._fd = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StagingLock:
        while not self._try_enter():
            pass
        self._thread = threading.Thread(target=self._beat, name="glmconv-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            os.ftruncate(self._fd, 0)  # an empty file has no holder
        finally:
            os.close(self._fd)

    def _try_enter(self) -> bool:
        """Take the lock; False when the file was replaced meanwhile. StorageError when it is busy."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, self._path, "open the lock") from error
        try:
            locked = self._flock()
            if not self._is_current():
                os.close(self._fd)
                return False
            self._refuse_living_holder(locked)
            self._write_holder()
            if not locked:
                self._confirm_claim()
        except BaseException:
            os.close(self._fd)
            raise
        return True

    def _flock(self) -> bool:
        """Whether the lock was taken; False where the filesystem has no locks. StorageError when held."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._busy(self._holder(), "it holds the lock") from error
            if error.errno not in _NO_LOCKS:
                raise storage_error(error, self._path, "lock") from error
            return False
        return True

    def _is_current(self) -> bool:
        """Whether the path still names the file that was opened (a finished run removes it)."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        held = os.fstat(self._fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def _holder(self) -> dict[str, Any]:
        """What the holder wrote; empty when nobody holds the file or the text is torn."""
        try:
            holder = json.loads(os.pread(self._fd, 4096, 0))
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _refuse_living_holder(self, locked: bool) -> None:
        """With our lock taken, a holder of this host is dead; one of another host is by its lease."""
        holder = self._holder()
        if not holder:
            return
        if holder.get("boot") == _boot_id():
            if not locked and _start_ticks(int(holder.get("pid", 0))) == holder.get("ticks"):
                raise self._busy(holder, "its process is alive")
            return
        age = self._age()
        if age < self._lease:
            raise self._busy(holder, f"its last sign of life is {age:.0f} s old")

    def _age(self) -> float:
        """Seconds since the last heartbeat, by the filesystem's own clock where it stamps files itself."""
        last = os.fstat(self._fd).st_mtime
        probe = self._path.with_name(f"lock.{os.getpid()}")
        try:
            probe.write_bytes(b"")
            return max(0.0, probe.stat().st_mtime - last)
        except OSError as error:
            raise storage_error(error, probe, "write") from error
        finally:
            probe.unlink(missing_ok=True)

    def _busy(self, holder: dict[str, Any], why: str) -> StorageError:
        who = "another process"
        if holder:
            who = f"process {holder.get('pid')} on {holder.get('host')}, started {holder.get('started')}"
        return StorageError(
            f"busy: {who} is converting to this destination ({why})",
            where=os.fspath(self._path.parent),
            hint=f"wait for it to end; if it died on another host, its claim ends after {self._lease:.0f} s",
        )

    def _write_holder(self) -> None:
        holder = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "boot": _boot_id(),
            "ticks": _start_ticks(os.getpid()),
        }
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode() + b"\n", 0)
        except OSError as error:
            raise storage_error(error, self._path, "write the lock") from error

    def _confirm_claim(self) -> None:
        """Without locks two processes may both have written: the one whose text stayed goes on."""
        time.sleep(SETTLE)
        holder = self._holder()
        if (holder.get("boot"), holder.get("pid")) != (_boot_id(), os.getpid()):
            raise self._busy(holder, "it took the destination at the same moment")

    def _beat(self) -> None:
        """Write one byte again: on network filesystems the server then stamps the time, not this host."""
        while not self._stop.wait(self._heartbeat):
            try:
                os.pwrite(self._fd, b"{", 0)
            except OSError:
                continue  # the next beat tries again; losing some is what the lease allows for
