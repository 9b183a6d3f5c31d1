"""Runs a function in a forked child and stops it at every call that changes a filesystem.

One child at a time, all of its threads traced (ptrace, see ``fs_calls``). With ``orderly`` a stopped
thread goes on only when every other thread sleeps or is stopped too, the eldest first: then the same
work makes the same calls in the same order, whatever the scheduler does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.support.fs_calls import Call, anonymous, decode, install_filter

_SEIZE, _CONT, _GET_REGISTERS, _SET_REGISTERS, _CALL_INFO = 0x4206, 7, 12, 13, 0x420E
_OPTIONS = 0x2 | 0x4 | 0x8 | 0x80 | 0x100000  # fork, vfork, clone, seccomp, exit kills
_EVENT_SECCOMP, _EVENT_STOP = 7, 128
_ALL_THREADS = 0x40000000  # __WALL
_INFO = struct.Struct("=B3xIQQQ6Q")
_RAX, _ORIG_RAX = 10, 15
_REGISTERS = 27
_STATE_FILES = ("stat", "schedstat")

SETTLING = 0.25
"""Seconds after which a busy thread is no longer waited for; then the order may differ."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Calls of this name whose text holds ``holding`` fail with ``errno`` instead of being made.

    ``after`` of them succeed first; ``times`` of them fail.
    """

    name: str
    errno: int
    holding: str = ""
    after: int = 0
    times: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Orders:
    """What to do with a run.

    Only calls on paths under ``watched`` count, and paths are told from there. ``kill`` is the number
    (from 1) of the call that the child is killed at, before it is made; ``kill_at`` is that call, and
    the how-manieth of its kind; ``fail`` is the number of one that fails, with an errno.
    """

    watched: Sequence[str]
    kill: int = 0
    kill_at: tuple[Call, int] | None = None
    fail: tuple[int, int] = (0, 0)
    refusals: Sequence[Refusal] = ()
    orderly: bool = True


@dataclass(slots=True)
class Traced:
    """How a child ended (exit code, or minus a signal), the calls it made, and the one it was killed at."""

    code: int = 0
    calls: list[Call] = field(default_factory=list)
    killed_at: Call | None = None
    unsettled: int = 0


def traced(work: Callable[[], int], orders: Orders) -> Traced:
    """Fork, run ``work`` in the child (its result is the exit code) and follow it to its end.

    RuntimeError on a machine whose system calls are not known here.
    """
    if os.uname().machine != "x86_64":
        raise RuntimeError("system calls are numbered for x86-64 only: see fs_calls")
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(go)
            os.read(ready, 1)
            install_filter()
            code = work()
        finally:
            os._exit(code)
    os.close(ready)
    try:
        _ptrace(_SEIZE, pid, 0, _OPTIONS)
        os.write(go, b"g")
        return _Follower(pid, orders).follow()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        _reap(pid)
        raise
    finally:
        os.close(go)


def _reap(pid: int) -> None:
    """Take the rest of a killed child's events, so that the next run does not see them."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, _ALL_THREADS)[0] != pid:
            pass


def _ptrace(request: int, pid: int, address: int, data: int) -> int:
    done = int(_libc.ptrace(request, pid, address, data))
    if done == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"ptrace {request:#x}")
    return done


class _Follower:
    def __init__(self, pid: int, orders: Orders) -> None:
        self._pid, self._orders = pid, orders
        self._watched = tuple(os.path.realpath(path) for path in orders.watched)
        self._threads: dict[int, int] = {pid: 0}
        self._held: dict[int, Call] = {}
        self._matches = [0] * len(orders.refusals)
        self._states: dict[int, tuple[int, ...]] = {}
        self._result = Traced()

    def follow(self) -> Traced:
        """Follow the child to its end."""
        try:
            return self._follow()
        finally:
            for fd in (fd for files in self._states.values() for fd in files):
                os.close(fd)

    def _follow(self) -> Traced:
        while True:
            tid, status = os.waitpid(-1, _ALL_THREADS | (os.WNOHANG if self._held else 0))
            if tid:
                if not self._take(tid, status):
                    return self._result
            elif self._settled():
                self._release()

    def _take(self, tid: int, status: int) -> bool:
        """Deal with one event; False when the child has ended."""
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self._threads.pop(tid, None)
            self._held.pop(tid, None)
            if tid == self._pid:
                self._result.code = os.waitstatus_to_exitcode(status)
                return False
            return True
        self._threads.setdefault(tid, len(self._threads) + 1)
        number, event = os.WSTOPSIG(status), status >> 16
        if event == _EVENT_SECCOMP:
            call = self._stopped_call(tid)
            if call is not None:
                self._held[tid] = call
                if not self._orders.orderly:
                    self._release()
                return True
        self._go_on(tid, number if event == 0 else 0)
        return True

    def _go_on(self, tid: int, number: int = 0) -> None:
        with suppress(ProcessLookupError):  # it was killed meanwhile: its end is the next event
            _ptrace(_CONT, tid, 0, number)

    def _stopped_call(self, tid: int) -> Call | None:
        """The call that a thread is stopped at, when it changes something that is watched."""
        buffer = ctypes.create_string_buffer(_INFO.size + 16)
        try:
            _ptrace(_CALL_INFO, tid, len(buffer), ctypes.addressof(buffer))
        except ProcessLookupError:
            return None
        _, _, _, _, number, *args = _INFO.unpack_from(buffer)
        call = decode(tid, number, tuple(args), lambda address: _string(tid, address))
        watched = call is not None and (self._is_watched(call.path) or self._is_watched(call.other))
        return call if watched else None

    def _is_watched(self, path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in self._watched)

    def _settled(self) -> bool:
        """Wait until all threads sleep or are stopped; False when one has news for the tracer first."""
        deadline = time.monotonic() + SETTLING
        before: list[tuple[bytes, bytes]] = []
        while time.monotonic() < deadline:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG | _ALL_THREADS):
                return False
            now = [self._state(tid) for tid in self._threads]
            if now == before and all(state in b"Stz" for state, _ in now):
                return True
            before = now
            time.sleep(0.00003)
        self._result.unsettled += 1
        return True

    def _state(self, tid: int) -> tuple[bytes, bytes]:
        """A thread's state, and how often it was run: the same twice, and it has not run in between."""
        if tid not in self._states:
            folder = f"/proc/{self._pid}/task/{tid}"
            try:
                self._states[tid] = tuple(os.open(f"{folder}/{name}", os.O_RDONLY) for name in _STATE_FILES)
            except OSError:
                return b"z", b""  # it ended; the tracer learns it next
        try:
            state, runs = (os.pread(fd, 1024, 0) for fd in self._states[tid])
        except OSError:
            return b"z", b""
        return state.rpartition(b")")[2].split()[0], runs

    def _release(self) -> None:
        """Let the eldest stopped thread make its call, or fail, or kill the child before it."""
        tid = min(self._held, key=self._threads.__getitem__)
        call = self._held.pop(tid)
        path, other = (self._brief(text) for text in (call.path, call.other))
        plain = Call(call.name, path, call.detail, other)
        self._result.calls.append(plain)
        number = len(self._result.calls)
        if number == self._orders.kill or self._is_chosen(plain):
            self._result.killed_at = plain
            os.kill(self._pid, signal.SIGKILL)
            return
        errno = self._orders.fail[1] if number == self._orders.fail[0] else self._refusal(call)
        if errno:
            _skip(tid, errno)
        self._go_on(tid)

    def _brief(self, path: str) -> str:
        for root in self._watched:
            path = path.removeprefix(root)
        return anonymous(path, self._pid)

    def _is_chosen(self, call: Call) -> bool:
        chosen = self._orders.kill_at
        return chosen is not None and call == chosen[0] and self._result.calls.count(call) == chosen[1]

    def _refusal(self, call: Call) -> int:
        for at, refusal in enumerate(self._orders.refusals):
            if call.name == refusal.name and refusal.holding in str(call):
                self._matches[at] += 1
                if refusal.after < self._matches[at] <= refusal.after + refusal.times:
                    return refusal.errno
        return 0


def _skip(tid: int, errno: int) -> None:
    """Make the call that ``tid`` is stopped at return an error, unmade."""
    registers = (ctypes.c_ulonglong * _REGISTERS)()
    _ptrace(_GET_REGISTERS, tid, 0, ctypes.addressof(registers))
    registers[_ORIG_RAX], registers[_RAX] = -1 & (1 << 64) - 1, -errno & (1 << 64) - 1
    _ptrace(_SET_REGISTERS, tid, 0, ctypes.addressof(registers))


def _string(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        data = b""
        while b"\0" not in data:
            # A page at a time: the next one need not be there.
            data += memory.read(4096 - (address + len(data)) % 4096)
    return os.fsdecode(data.partition(b"\0")[0])
