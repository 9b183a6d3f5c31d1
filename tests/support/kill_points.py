"""glmconv's command line, run a hundred times in the time of ten: forked, traced, killed at a chosen call.

``Commands`` starts a process that has glmconv imported and forks it for every run, so that a run costs
some hundredths of a second. A traced run tells every system call that changes a filesystem under the
watched folders; a run can be killed by SIGKILL right before the n-th of them, or one of them can be
made to fail. ``python -m tests.support.kill_points`` is that process; it speaks JSON, a line a run.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.fs_calls import Call
from tests.support.tracer import Orders, Refusal, traced

ROOT = Path(__file__).resolve().parents[2]
SMALL_JOURNAL = 1 << 15
"""Bytes after which a run records what it finished: a small checkpoint is then recorded in several parts."""


@dataclass(slots=True)
class Run:
    """How a run ended: its exit code (minus the signal that ended it), its words, and what it changed."""

    code: int
    out: str
    err: str
    calls: list[Call] = field(default_factory=list)
    killed_at: Call | None = None
    unsettled: int = 0

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    def json(self) -> Any:
        """What it printed, for a command with ``--json``."""
        return json.loads(self.out)


class Commands:
    """A server process of runs; one run at a time, several servers side by side."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
        environment["PYTHONHASHSEED"] = "0"  # sets are walked in the same order in every run
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_points"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server; its present run dies with it."""
        if self._server.stdin:
            self._server.stdin.close()
        self._server.wait()

    def run(
        self,
        *arguments: str | Path,
        watched: Iterable[Path] = (),
        kill: int = 0,
        kill_at: tuple[Call, int] | None = None,
        fail: tuple[int, int] = (0, 0),
        refusals: Sequence[Refusal] = (),
        orderly: bool = True,
        journal_bytes: int = SMALL_JOURNAL,
    ) -> Run:
        """``glmconv ARGUMENTS``; traced when folders are ``watched`` (see :class:`Orders`)."""
        orders = Orders([os.fspath(path) for path in watched], kill, kill_at, fail, refusals, orderly)
        request = {
            "arguments": [os.fspath(argument) for argument in arguments],
            "journal_bytes": journal_bytes,
        }
        if self._server.stdin is None or self._server.stdout is None:
            raise RuntimeError("the server has no pipes")
        self._server.stdin.write(json.dumps(request | {"orders": asdict(orders)}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError("the server of runs has died")
        found = json.loads(answer)
        calls = [Call(*entry) for entry in found.pop("calls")]
        killed_at = found.pop("killed_at")
        return Run(calls=calls, killed_at=Call(*killed_at) if killed_at else None, **found)


def _import_glmconv() -> None:
    """Everything that a conversion or a check imports, so that a forked run finds it there."""
    for name in ("bridges", "glmconv", "mappings"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.startswith("glmconv.verify") and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in _imported_by("convert", "/nowhere", "/nowhere/out"):
        with suppress(ImportError):
            importlib.import_module(name)


def _imported_by(*arguments: str) -> list[str]:
    """Modules that a command imports when it runs (those of the command line's library)."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        null = os.open(os.devnull, os.O_WRONLY)
        _command_line(list(arguments), SMALL_JOURNAL, null, null)
        with os.fdopen(done, "w") as file:
            file.write("\n".join(sys.modules))
        os._exit(0)
    os.close(done)
    with os.fdopen(ready) as file:
        names = [name for name in file.read().splitlines() if name not in sys.modules]
    os.waitpid(pid, 0)
    return names


def _command_line(arguments: list[str], journal_bytes: int, out: int, err: int) -> int:
    """In the forked child: ``glmconv`` as a shell would start it. Returns its exit code."""
    import glmconv.cli
    import glmconv.commands.convert

    os.dup2(out, 1)
    os.dup2(err, 2)
    # The command line has no option for it, and its default is far above these checkpoints' size.
    smaller: Any = functools.partial(glmconv.commands.convert.RunOptions, journal_bytes=journal_bytes)
    glmconv.commands.convert.RunOptions = smaller  # type: ignore[misc]
    sys.argv = ["glmconv", *arguments]
    code: Any = 0
    try:
        glmconv.cli.main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    asked = request["orders"]
    refusals = [Refusal(**one) for one in asked.pop("refusals")]
    chosen = asked.pop("kill_at")
    kill_at = (Call(**chosen[0]), chosen[1]) if chosen else None
    orders = Orders(**asked | {"refusals": refusals, "fail": tuple(asked["fail"]), "kill_at": kill_at})
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        descriptors = out.fileno(), err.fileno()
        work = functools.partial(_command_line, request["arguments"], request["journal_bytes"], *descriptors)
        done = traced(work, orders)
        texts = {}
        for name, file in (("out", out), ("err", err)):
            file.seek(0)
            texts[name] = file.read().decode(errors="replace")
    fields = asdict(done)
    fields["calls"] = [list(asdict(call).values()) for call in done.calls]
    fields["killed_at"] = list(asdict(done.killed_at).values()) if done.killed_at else None
    return fields | texts


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import_glmconv()
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")


if __name__ == "__main__":
    _main()
