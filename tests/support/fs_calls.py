"""System calls that change a filesystem: which there are, and what a stopped thread is about to do.

Numbers are those of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl of the kernel). A seccomp filter
stops a process at these calls alone, so that all others run at full speed.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

AT_FDCWD = -100
CHANGING_OPEN = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING_IOCTLS = {0x40049409: "FICLONE", 0x4020940D: "FICLONERANGE", 0xC0189436: "FIDEDUPERANGE"}
RENAME_EXCHANGE = 2
MAP_SHARED, PROT_WRITE = 1, 2

Reader = Callable[[int], str]
"""Reads the string at an address of the stopped process."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changes files; ``detail`` are flags, ``other`` is the source of a rename or link."""

    name: str
    path: str
    detail: str = ""
    other: str = ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(filter(None, (self.other, self.path, self.detail)))})"


_BY_PATH = {2: "open", 85: "creat", 76: "truncate", 84: "rmdir", 87: "unlink", 83: "mkdir", 133: "mknod"}
_BY_PATH |= {90: "chmod", 92: "chown", 94: "lchown", 132: "utime", 235: "utimes"}
_BY_PATH |= {188: "setxattr", 189: "lsetxattr", 197: "removexattr", 198: "lremovexattr"}
_BY_AT = {257: "openat", 437: "openat2", 263: "unlinkat", 258: "mkdirat", 259: "mknodat"}
_BY_AT |= {268: "fchmodat", 452: "fchmodat2", 260: "fchownat", 280: "utimensat", 261: "futimesat"}
_BY_FD = {1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2", 77: "ftruncate"}
_BY_FD |= {285: "fallocate", 74: "fsync", 75: "fdatasync", 277: "sync_file_range", 306: "syncfs"}
_BY_FD |= {91: "fchmod", 93: "fchown", 190: "fsetxattr", 199: "fremovexattr", 40: "sendfile", 16: "ioctl"}
_BY_SECOND_FD = {326: "copy_file_range", 275: "splice"}
_TWO_PATHS = {82: "rename", 86: "link", 88: "symlink"}
_TWO_AT = {264: "renameat", 316: "renameat2", 265: "linkat"}
_OTHER = {266: "symlinkat", 162: "sync", 26: "msync"}
_UNSEEN = {9: "mmap", 425: "io_uring_setup"}
TRACED = (
    _BY_PATH.keys()
    | _BY_AT.keys()
    | _BY_FD.keys()
    | _BY_SECOND_FD.keys()
    | _TWO_PATHS.keys()
    | _TWO_AT.keys()
    | _OTHER.keys()
    | _UNSEEN.keys()
)


def decode(pid: int, number: int, args: tuple[int, ...], read: Reader) -> Call | None:
    """What a stopped call would change; None for one that changes no file (an open for reading).

    Raises RuntimeError for a way of writing whose later changes no tracer sees.
    """
    call: Call | None = None
    if number in _UNSEEN:
        _refuse_unseen(pid, number, args)
    elif number in _BY_PATH:
        name, path = _BY_PATH[number], _at(pid, AT_FDCWD, read(args[0]))
        call = _opening(name, path, args[1]) if name == "open" else Call(name, path)
    elif number in _BY_AT:
        call = _by_at(pid, _BY_AT[number], args, read)
    elif number in _BY_FD:
        call = _by_descriptor(pid, _BY_FD[number], args)
    elif number in _BY_SECOND_FD:
        call = Call(_BY_SECOND_FD[number], _descriptor(pid, args[2]))
    else:
        call = _with_two_paths(pid, number, args, read)
    return call


def _by_descriptor(pid: int, name: str, args: tuple[int, ...]) -> Call | None:
    path = _descriptor(pid, args[0])
    if name == "ioctl":
        clone = CHANGING_IOCTLS.get(args[1] & 0xFFFFFFFF)
        return Call(clone, path) if clone else None
    return Call(name, path)


def _by_at(pid: int, name: str, args: tuple[int, ...], read: Reader) -> Call | None:
    if name == "utimensat" and args[1] == 0:
        return Call("futimens", _descriptor(pid, args[0]))
    path = _at(pid, args[0], read(args[1]))
    if name == "openat":
        return _opening(name, path, args[2])
    if name == "openat2":
        raise RuntimeError("openat2 is not decoded")
    return Call(name, path, "AT_REMOVEDIR" if name == "unlinkat" and args[2] else "")


def _with_two_paths(pid: int, number: int, args: tuple[int, ...], read: Reader) -> Call:
    if number in _TWO_PATHS:
        left, right = _at(pid, AT_FDCWD, read(args[0])), _at(pid, AT_FDCWD, read(args[1]))
        return Call(_TWO_PATHS[number], right, other=left)
    if number in _TWO_AT:
        left, right = _at(pid, args[0], read(args[1])), _at(pid, args[2], read(args[3]))
        exchange = number == 316 and args[4] & RENAME_EXCHANGE
        return Call(_TWO_AT[number], right, "RENAME_EXCHANGE" if exchange else "", left)
    if number == 266:
        return Call("symlinkat", _at(pid, args[1], read(args[2])))
    return Call(_OTHER[number], "")


def _refuse_unseen(pid: int, number: int, args: tuple[int, ...]) -> None:
    if _UNSEEN[number] == "io_uring_setup":
        raise RuntimeError("io_uring writes past this tracer: teach it those calls first")
    shared, writes, fd = args[3] & MAP_SHARED, args[2] & PROT_WRITE, _signed(args[4])
    if shared and writes and fd >= 0:
        raise RuntimeError(f"a shared mapping of {_descriptor(pid, fd)} is written past this tracer")


def _opening(name: str, path: str, flags: int) -> Call | None:
    if not flags & CHANGING_OPEN:
        return None
    words = [word for word in ("O_CREAT", "O_TRUNC", "O_EXCL") if flags & getattr(os, word)]
    return Call(name, path, "|".join(words))


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFFFFFF).value


def _descriptor(pid: int, fd: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{_signed(fd)}").removesuffix(" (deleted)")
    except OSError:
        return ""


def _at(pid: int, directory: int, path: str) -> str:
    """An absolute path, as the stopped process sees it; links in it are not followed."""
    if path.startswith("/"):
        return os.path.normpath(path)
    base = os.readlink(f"/proc/{pid}/cwd") if _signed(directory) == AT_FDCWD else _descriptor(pid, directory)
    return os.path.normpath(os.path.join(base, path))


def anonymous(text: str, pid: int) -> str:
    """A path without what differs from run to run: process numbers and random suffixes."""
    return re.sub(r"(?<![0-9a-f])[0-9a-f]{8,}(?![0-9a-f])", "*", text.replace(str(pid), "*"))


_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_X86_64 = 0xC000003E
_NUMBER, _ARCH, _MMAP_FLAGS = 0, 4, 16 + 8 * 3


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def install_filter() -> None:
    """Stop this thread, and those it starts, at every traced call, for the tracer. OSError on failure."""
    numbers = sorted(TRACED - {9})
    # Jumps count the lines that they skip: to the last line (trace), or to the one before it (allow).
    code = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 0, len(numbers) + 4, _X86_64), (_LOAD, 0, 0, _NUMBER)]
    code += [(_JUMP_EQUAL, len(numbers) - at + 3, 0, number) for at, number in enumerate(numbers)]
    code += [
        (_JUMP_EQUAL, 0, 2, 9),  # mmap: only where it is shared
        (_LOAD, 0, 0, _MMAP_FLAGS),
        (_JUMP_SET, 1, 0, MAP_SHARED),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _TRACE),
    ]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = _Program(len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    for arguments in (
        (set_no_new_privileges, 1, 0, 0, 0),
        (set_seccomp, filter_mode, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
