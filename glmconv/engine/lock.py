"""One conversion at a time in a staging directory.

``flock`` tells on one host, and on network filesystems that carry it, whether the holder lives: a
dead one's lock is free at once. Where locks do not reach another host, its lease does: a holder
touches the file every half minute, and one that has not for minutes is taken for dead. A holder
that was only asleep finds out by :meth:`StagingLock.check` before it changes anything again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from glmconv.basics.errors import StorageError
from glmconv.engine.files import make_directories, sync_directory
from glmconv.storage.errors import storage_error

LOCK = "lock"

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

    Entering raises StorageError that names the holder when the directory is in use. After
    :meth:`remove_with_directory` leaving the block removes the lock and the empty directory.
    """

    def __init__(self, staging: Path, *, heartbeat: float = HEARTBEAT, lease: float = LEASE) -> None:
        self.token = secrets.token_hex(8)
        self._path = staging / LOCK
        self._heartbeat = heartbeat
        self._lease = lease
        self._fd = -1
        self._removes = False
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
            if self._is_ours():
                self._leave()
        except OSError as failure:
            if error is None:
                raise storage_error(failure, self._path, "leave the staging directory") from failure
        finally:
            with suppress(OSError):  # nothing that was written there is of use any more
                os.close(self._fd)
        if self._removes:
            # Network filesystems keep the name of an unlinked open file until it is closed: only now
            # is the directory empty there.
            for orphan in self._path.parent.glob(".nfs*"):
                with suppress(OSError):  # a name that outlived its file, unless somebody holds that open
                    orphan.unlink()
            with suppress(OSError, StorageError):  # another run may have entered it meanwhile
                self._path.parent.rmdir()
                sync_directory(self._path.parent.parent)

    def _leave(self) -> None:
        if self._removes:
            self._path.unlink()
        else:
            os.ftruncate(self._fd, 0)  # an empty file has no holder

    def check(self) -> None:
        """Raise StorageError unless the lock is still ours: a lease ends where its holder was asleep."""
        try:
            ours = self._is_ours()
        except OSError as error:
            raise storage_error(error, self._path, "look at the lock") from error
        if not ours:
            holder = self._holder(self._named())
            who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "another process"
            raise StorageError(
                f"this run lost the destination: {who} took it over while this one gave no sign of life",
                where=os.fspath(self._path.parent),
                hint="let one of the two end; this one has stopped and written nothing since",
            )

    def remove_with_directory(self) -> None:
        """Remove the lock, and the directory if nothing else is in it, when the block is left."""
        self._removes = True

    def _is_ours(self) -> bool:
        """Whether the path names our file and our text stands in it."""
        return self._is_current() and self._holder(self._named()).get("token") == self.token

    def _named(self) -> bytes:
        """The text of the file that the path names now, read anew: another host may have written it."""
        try:
            with open(self._path, "rb") as file:
                return file.read(4096)
        except FileNotFoundError:
            return b""

    def _try_enter(self) -> bool:
        """Take the lock; False when the file was replaced meanwhile. StorageError when it is busy."""
        try:
            make_directories(self._path.parent)  # a run that ended meanwhile removed it
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return False
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
                raise self._busy(self._holder(self._text()), "it holds the lock") from error
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

    def _text(self) -> bytes:
        return os.pread(self._fd, 4096, 0)

    @staticmethod
    def _holder(text: bytes) -> dict[str, Any]:
        """What a holder wrote; empty when nobody holds the file or the text is torn."""
        try:
            holder = json.loads(text)
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _refuse_living_holder(self, locked: bool) -> None:
        """With our lock taken, a holder of this host is dead; one of another host is by its lease."""
        holder = self._holder(self._text())
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
            "token": self.token,
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
        holder = self._holder(self._named())
        if holder.get("token") != self.token:
            raise self._busy(holder, "it took the destination at the same moment")

    def _beat(self) -> None:
        """Write one byte again: on network filesystems the server then stamps the time, not this host.

        A lock that was lost is left alone: the stamp would tell of a life that is not its holder's.
        """
        while not self._stop.wait(self._heartbeat):
            try:
                if self._is_ours():
                    os.pwrite(self._fd, b"{", 0)
            except OSError:
                continue  # the next beat tries again; losing some is what the lease allows for
