"""Run a function in N gloo processes, with a chosen megatron-core.

A *lane* is a version of megatron-core. ``0.16.1`` is the one in the environment; ``0.19.2`` is
that of ``GLMCONV_MCORE_NEXT`` (directories made with ``pip install --target``, separated as
in ``PYTHONPATH``), or the environment's where it is that new. Functions run in fresh
processes, so that lanes, process groups and compat steps never meet pytest's own process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LANES = ("0.16.1", "0.19.2")
ATTEMPTS = 3
"""Another process may take the free port before rank 0 listens on it: then all start again."""
ROOT = Path(__file__).resolve().parents[2]


def lane_path(lane: str) -> str | None:
    """What has to come first on ``PYTHONPATH`` for ``lane``; None where the lane is not there."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    minor = lane.rpartition(".")[0] + "."
    if lane == LANES[1] and os.environ.get("GLMCONV_MCORE_NEXT"):
        return os.environ["GLMCONV_MCORE_NEXT"]
    return "" if installed.startswith(minor) else None


def run(
    function: Callable[..., Any],
    *,
    lane: str,
    world: int = 1,
    arguments: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Call ``function(**arguments)`` in ``world`` processes; return what each returned, by rank.

    ``function`` is a module's top-level function; arguments and results pass as JSON, tensors
    by files that the function writes. Raises ``AssertionError`` with the end of the output of
    every process where one fails or the time is over.
    """
    path = lane_path(lane)
    if path is None:
        raise AssertionError(f"megatron-core {lane} is not here: set GLMCONV_MCORE_NEXT")
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="glmconv-run-") as scratch:
            call = [
                f"{function.__module__}:{function.__qualname__}",
                json.dumps(dict(arguments or {})),
                scratch,
            ]
            codes, outputs = _start(call, path, world, timeout)
            if not any(codes):
                return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(world)]
        if not any("EADDRINUSE" in text for text in outputs):
            break
    ends = "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(outputs))
    raise AssertionError(f"{function.__qualname__} failed with megatron-core {lane}:\n{ends}")


def _start(call: list[str], path: str, world: int, timeout: float) -> tuple[list[int], list[str]]:
    """Exit code and output of each rank."""
    port = _free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.mcore_run", *call],
            cwd=ROOT,
            env=_environment(path, rank, world, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def _environment(path: str, rank: int, world: int, port: int) -> dict[str, str]:
    paths = [*path.split(os.pathsep), str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(part for part in paths if part),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | settings


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(name: str, arguments: str, scratch: str) -> None:
    module, _, attribute = name.partition(":")
    result = getattr(importlib.import_module(module), attribute)(**json.loads(arguments))
    (Path(scratch) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
