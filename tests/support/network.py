"""Mounts a filesystem that has a network's manners (``fuse_fs``), and arms its faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.mounts import unavailable

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to calls of operation ``op`` on paths that match the glob ``path``.

    The first ``after`` of them are left alone, the next ``times`` fail with ``errno`` (0: they do not
    fail), come ``delay`` seconds late, and move at most ``most`` bytes (0: as many as asked).
    """

    op: str
    path: str = "*"
    errno: int = 0
    after: int = 0
    times: int = 1 << 30
    delay: float = 0.0
    most: int = 0


class Network:
    """A mounted filesystem: ``path`` is where, ``backing`` the local folder that holds its files."""

    def __init__(self, path: Path, backing: Path, server: subprocess.Popen[str]) -> None:
        self.path, self.backing = path, backing
        self._server = server

    def arm(self, *faults: Fault) -> None:
        """Let these faults, and no others, happen from now on; counts begin anew."""
        self._ask({"arm": [asdict(fault) for fault in faults]})

    def calm(self) -> None:
        """Let no fault happen."""
        self.arm()

    def calls(self) -> Counter[str]:
        """How often each operation was called since the last :meth:`arm`; ``op:failed`` for failed ones."""
        return Counter(self._ask({"count": True}))

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._server.stdin is None or self._server.stdout is None:
            raise RuntimeError("the server has no pipes")
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextmanager
def mounted_network(root: Path, *, locks: bool = False) -> Iterator[Network]:
    """Mount one under ``root`` (which must exist). Skips the test where that cannot be; in CI it fails."""
    if not os.path.exists("/dev/fuse"):
        unavailable("there is no /dev/fuse")
    backing, point = root / "backing", root / "network"
    backing.mkdir()
    point.mkdir()
    command = [sys.executable, "-m", "tests.support.fuse_fs", os.fspath(backing), os.fspath(point)]
    server = subprocess.Popen(
        [*command, *(["locks"] if locks else [])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.fspath(ROOT), "FUSE_LIBRARY_NAME": "fuse3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not os.path.ismount(point):
        if server.poll() is not None:
            text = server.stderr.read() if server.stderr else ""
            unavailable(f"cannot mount a FUSE filesystem: {text.strip()[-500:]}")
        time.sleep(0.01)
    try:
        yield Network(point, backing, server)
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(point)], check=True)
        server.communicate(timeout=30)
