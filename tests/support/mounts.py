"""Filesystems that tests mount themselves; needs root, loop devices and the mkfs tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def unavailable(why: str) -> None:
    """Skip the test; in CI, where everything must be there, fail it."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@contextmanager
def mounted(kind: str, root: Path, size: int) -> Iterator[Path]:
    """A fresh filesystem of ``kind`` (``xfs``, ``btrfs``, ``tmpfs``) of ``size`` bytes under ``root``."""
    point, image = root / kind, root / f"{kind}.image"
    point.mkdir()
    arguments = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    if kind != "tmpfs":
        if shutil.which(f"mkfs.{kind}") is None:
            unavailable(f"mkfs.{kind} is not installed")
        with image.open("xb") as file:
            file.truncate(size)
        subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True)
        arguments = ["-o", "loop", str(image)]
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
    if done.returncode:
        unavailable(f"cannot mount: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
        image.unlink(missing_ok=True)


def used_bytes(path: Path) -> int:
    """Bytes of a filesystem that are taken, once everything written is on the device."""
    os.sync()
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still take."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
