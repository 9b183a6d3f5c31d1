"""Situations that a run is killed in, and what must hold right after the kill and after the next run.

A scene is a command over a prepared destination. It is run once to enumerate its places (calls that
change the filesystem), and then once for each place, killed there and run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path
from typing import Any

from tests.support.fs_calls import Call
from tests.support.kill_points import Commands, Run
from tests.support.plain import plain, snapshot
from tests.support.tracer import Refusal

JOURNAL_BYTES = 1 << 17
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "glmconv.json"
NO_EXCHANGE = Refusal("renameat2", EINVAL, "RENAME_EXCHANGE")


@dataclass(frozen=True, slots=True)
class Scene:
    """One situation.

    ``to`` is the target kind; ``overwrite`` replaces an old, different unit; ``exchange`` is whether
    the filesystem can swap two names; ``resumed``: the run that is looked at goes on from one that was
    killed in its middle; ``beside``: the root holds another unit already; ``deep``: the directories
    above the destination are not there yet.
    """

    to: str
    workers: int = 1
    overwrite: bool = False
    exchange: bool = True
    resumed: bool = False
    beside: bool = False
    deep: bool = False

    def __str__(self) -> str:
        words = [name for name in ("overwrite", "resumed", "beside", "deep") if getattr(self, name)]
        words += [] if self.exchange else ["without exchange"]
        return f"{self.to}, {self.workers} worker{'s' * (self.workers > 1)}, {' '.join(words) or 'fresh'}"


def scenes(workers: Iterable[int] = (1, 2)) -> list[Scene]:
    """Every situation, for each number of workers."""
    found = []
    for count in workers:
        for to in ("megatron", "hf"):
            found += [
                Scene(to, count),
                Scene(to, count, deep=True),
                Scene(to, count, resumed=True),
                Scene(to, count, overwrite=True),
                Scene(to, count, overwrite=True, exchange=False),
                Scene(to, count, overwrite=True, resumed=True),
            ]
        found.append(Scene("megatron", count, beside=True))
    return found


def memory_folder() -> Path | None:
    """Thousands of small files come and go: in memory, where that is a filesystem (None: anywhere)."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else None


Tree = dict[str, str]
"""A digest of every file under a folder (directories have none), by its path there."""


def tree(folder: Path) -> Tree | None:
    """None where there is no such folder."""
    if not folder.is_dir():
        return None
    return {path.relative_to(folder).as_posix(): _digest(path) for path in folder.rglob("*")}


def _digest(path: Path) -> str:
    return "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_hashes(unit: Path) -> Any:
    """What a unit's manifest says of each file and payload; None where it is not whole."""
    try:
        return json.loads((unit / MANIFEST).read_bytes()).get("files")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Unit:
    """A finished unit: its files without the manifest (which tells times), and the manifest's hashes."""

    files: Tree
    hashes: Any

    @classmethod
    def at(cls, folder: Path) -> Unit | None:
        files = tree(folder)
        if files is None or MANIFEST not in files:
            return None
        del files[MANIFEST]
        return cls(files, manifest_hashes(folder))


class Sources:
    """The checkpoints that scenes convert, and others that stand at the destination before."""

    def __init__(self, root: Path, commands: Commands) -> None:
        self._root = root
        plain("qwen3").write(root / "new" / "hf")
        plain("qwen3-untied").write(root / "old" / "hf")
        for age in ("new", "old"):
            done = commands.run("convert", root / age / "hf", root / age / "megatron", "--to", "megatron")
            assert done.code == 0, done.err
        self.before = snapshot(root)

    def of(self, to: str, age: str = "new") -> Path:
        """What is converted into a target of kind ``to``."""
        return self._root / age / ("hf" if to == "megatron" else "megatron")

    def standing(self, to: str) -> Path:
        """An older checkpoint of kind ``to``, as a whole destination."""
        return self._root / "old" / to

    def touched(self) -> bool:
        return snapshot(self._root) != self.before


class Stage:
    """Plays one scene in a folder of its own, with one server of runs."""

    def __init__(
        self, scene: Scene, sources: Sources, folder: Path, commands: Commands, *, closes_late: bool = False
    ) -> None:
        self.scene, self._sources, self._commands = scene, sources, commands
        self.closes_late = closes_late
        self.parent = folder
        self.dst = folder / "deep" / "er" / "out" if scene.deep else folder / "out"
        self.unit = self.dst / "release" if scene.to == "megatron" else self.dst

    def arguments(self) -> list[str | Path]:
        scene = self.scene
        words: list[str | Path] = ["convert", self._sources.of(scene.to), self.dst, "--to", scene.to]
        return [*words, "-j", str(scene.workers), *(["--overwrite"] if scene.overwrite else [])]

    def run(
        self,
        *,
        traced: bool = False,
        kill: int = 0,
        kill_at: tuple[Call, int] | None = None,
        fail: tuple[int, int] = (0, 0),
    ) -> Run:
        """The scene's command; killed before a call, or with one call failing."""
        refusals = () if self.scene.exchange else (NO_EXCHANGE,)
        # Without an order to kill, only a refusal needs the tracer.
        watched = [self.parent] if traced or kill or kill_at or fail[0] or refusals else []
        return self._commands.run(
            *self.arguments(),
            watched=watched,
            kill=kill,
            kill_at=kill_at,
            fail=fail,
            refusals=refusals,
            journal_bytes=JOURNAL_BYTES,
        )

    def prepare(self, middle: int) -> None:
        """Make the destination as the scene begins; ``middle`` is where an earlier run was killed."""
        removed(self.parent)
        self.parent.mkdir(parents=True)
        if self.scene.overwrite:
            shutil.copytree(self._sources.standing(self.scene.to), self.dst)
        if self.scene.beside:
            shutil.copytree(self._sources.standing("megatron") / "release", self.dst / "iter_0000005")
            (self.dst / TRACKER).write_text("5")
        if self.scene.resumed:
            killed = self.run(kill=middle)
            assert killed.was_killed, (
                f"the first run was not killed in its middle: {killed.code} {killed.err}"
            )

    def middle(self) -> int:
        """Number of the call behind the middle one of those that make a record of finished work durable."""
        if not self.scene.resumed:
            return 0
        self.scene, own = Scene(self.scene.to, self.scene.workers, overwrite=self.scene.overwrite), self.scene
        try:
            self.prepare(0)
            calls = self.run(traced=True).calls
        finally:
            self.scene = own
        return after_records(calls, 0.5)

    def names(self) -> set[str]:
        """Names that stand beside the unit and above it, up to the scene's folder."""
        found = {f"./{name}" for name in os.listdir(self.parent)}
        if self.unit != self.dst and self.dst.is_dir():
            found |= {f"root/{name}" for name in os.listdir(self.dst)}
        if self.scene.deep and self.dst.parent.is_dir():
            found |= {f"above/{name}" for name in os.listdir(self.dst.parent)}
        return found


def after_records(calls: Sequence[Call], share: float) -> int:
    """Number of the call that comes after ``share`` of the journal's flushes. ValueError if there is none."""
    flushes = [at for at, call in enumerate(calls, 1) if _is_record(call)]
    if len(flushes) < 3:
        raise ValueError("the run made no records of its work to be killed between")
    return flushes[max(1, int(len(flushes) * share))] + 1


def _is_record(call: Call) -> bool:
    return call.name in ("fdatasync", "fsync") and os.path.basename(call.path).startswith("journal")


def removed(folder: Path, seconds: float = 5.0) -> None:
    """Remove a folder that may be on a network filesystem, where a killed process' files close late."""
    deadline = time.monotonic() + seconds
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)
