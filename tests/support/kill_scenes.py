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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
LATE = 2.0
"""Seconds in which the files that a process had open are closed on a network filesystem."""

TRIES = 4
"""Runs that may be spent on one place, should the scheduler make another call come first."""


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


@dataclass(slots=True)
class Place:
    """A place of a scene that a run was killed at, and what was wrong then or after the next run."""

    scene: Scene
    number: int
    call: Call
    runs: int = 0
    hit: bool = False
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.scene}, disturbed at call {self.number}, {self.call}: {'; '.join(self.problems)}"


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

    def run(self, *, traced: bool = False, kill: int = 0, fail: tuple[int, int] = (0, 0)) -> Run:
        """The scene's command; killed before its ``kill``-th call, or with one call failing."""
        refusals = () if self.scene.exchange else (NO_EXCHANGE,)
        # Without an order to kill, only a refusal needs the tracer.
        watched = [self.parent] if traced or kill or fail[0] or refusals else []
        return self._commands.run(
            *self.arguments(),
            watched=watched,
            kill=kill,
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


@dataclass(slots=True)
class Calm:
    """What a scene is like undisturbed: its calls, its result, the old unit, the names that stay."""

    calls: list[Call]
    middle: int
    new: Unit
    old: Tree | None
    names: set[str]
    tracker: str | None


def calm_run(stage: Stage) -> Calm:
    """Run a scene undisturbed, traced. AssertionError when that goes wrong or leaves anything behind."""
    middle = stage.middle()
    stage.prepare(middle)
    old = tree(stage.unit)
    done = stage.run(traced=True)
    assert done.code == 0, f"{stage.scene}: {done.err}"
    new = Unit.at(stage.unit)
    assert new is not None, "there is no unit"
    names, tracker = stage.names(), _tracker(stage)
    left = [name for name in names if os.path.basename(name).startswith(".")]
    assert not left, f"an undisturbed run leaves {left}"
    if not stage.scene.beside:
        assert tracker == ("release" if stage.scene.to == "megatron" else None), tracker
    return Calm(done.calls, middle, new, old, names, tracker)


def _tracker(stage: Stage) -> str | None:
    try:
        return (stage.dst / TRACKER).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def play(stage: Stage, calm: Calm, number: int) -> Place:
    """Kill the scene before its ``number``-th call, look, run the same command again, look."""
    place = Place(stage.scene, number, calm.calls[number - 1])
    while not place.hit and place.runs < TRIES:
        stage.prepare(calm.middle)
        killed = stage.run(kill=number)
        place.runs += 1
        place.hit = killed.was_killed and _alike(killed.killed_at, place.call)
    if not place.hit:
        place.problems.append(f"never hit: {killed.code}, killed at {killed.killed_at}")
        return place
    finish(stage, calm, place.problems)
    return place


def play_failure(stage: Stage, calm: Calm, number: int, errno: int) -> Place:
    """Let the scene's ``number``-th call fail, look, run the same command again, look."""
    place = Place(stage.scene, number, calm.calls[number - 1])
    stage.prepare(calm.middle)
    done = stage.run(fail=(number, errno))
    place.runs, place.hit = 1, len(done.calls) >= number
    judge_failed(done, place.problems)
    finish(stage, calm, place.problems)
    return place


def judge_failed(done: Run, problems: list[str]) -> None:
    """A run that met an error survived it, or ended with exit code 3 and words that help."""
    if done.code not in (0, 3) or "Traceback" in done.err or (done.code and "try:" not in done.err):
        problems.append(f"the run ends with {done.code}: {last_words(done)}")


def last_words(done: Run) -> str:
    """Its message on stderr; of a traceback, where it comes from and what it says."""
    lines = done.err.strip().splitlines()
    if "Traceback" not in done.err:
        return " ".join(lines)
    places = [line.strip() for line in lines if "/glmconv/" in line and line.strip().startswith("File ")]
    return f"Traceback, {places[-1] if places else ''}: {lines[-1]}"


def finish(stage: Stage, calm: Calm, problems: list[str]) -> None:
    """Look at what a disturbed run left, run the same command again, and look at the end."""
    whole = _look_right_after(stage, calm, problems)
    again = stage.run()
    finished = whole and again.code == 3 and "exists already" in again.err
    if again.code and not finished:
        problems.append(f"the same command ends with {again.code}: {last_words(again)}")
    _look_in_the_end(stage, calm, problems)


def removed(folder: Path, seconds: float = 5.0) -> None:
    """Remove a folder that may be on a network filesystem, where a killed process' files close late."""
    deadline = time.monotonic() + seconds
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)


def _alike(call: Call | None, other: Call) -> bool:
    """Whether two calls of two runs in different folders of the same scene are the same."""
    if call is None:
        return False
    ends = (os.path.basename(call.path), os.path.basename(call.other))
    return (call.name, call.detail, *ends) == (
        other.name,
        other.detail,
        os.path.basename(other.path),
        os.path.basename(other.other),
    )


def _look_right_after(stage: Stage, calm: Calm, problems: list[str]) -> bool:
    """What must hold at the moment of the kill; True when all is done already."""
    found = tree(stage.unit)
    is_new = found is not None and Unit.at(stage.unit) == calm.new
    is_old = found is not None and found == calm.old
    aside = calm.old is not None and not stage.scene.exchange and _holds(stage.parent, calm.old)
    absent = found is None and (calm.old is None or aside)
    if not (is_new or is_old or absent):
        problems.append(f"right after, the destination holds {sorted(found) if found else found}")
    tracker = _tracker(stage)
    named = None if tracker is None else "release" if tracker == "release" else f"iter_{int(tracker):07}"
    if named is not None and tree(stage.dst / named) is None and not aside:
        problems.append(f"right after, the tracker names {named}, which is not there")
    return is_new and tracker == calm.tracker and stage.names() == calm.names


def _holds(folder: Path, wanted: Tree) -> bool:
    """Whether a whole copy of a unit is anywhere under ``folder``."""
    return any(tree(Path(path)) == wanted for path, _, _ in os.walk(folder))


def _look_in_the_end(stage: Stage, calm: Calm, problems: list[str]) -> None:
    found = Unit.at(stage.unit)
    if found != calm.new:
        problems.append(f"in the end, other bytes: {_difference(found, calm.new)}")
    deadline = time.monotonic() + LATE
    while stage.names() != calm.names and time.monotonic() < deadline and stage.closes_late:
        time.sleep(0.02)
    if stage.names() != calm.names:
        left, gone = sorted(stage.names() - calm.names), sorted(calm.names - stage.names())
        problems.append(f"in the end, left over {left}, missing {gone}")
    if _tracker(stage) != calm.tracker:
        problems.append(f"in the end, the tracker says {_tracker(stage)!r}, not {calm.tracker!r}")


def _difference(found: Unit | None, wanted: Unit) -> str:
    if found is None:
        return "no unit"
    all_names = found.files.keys() | wanted.files.keys()
    names = sorted(name for name in all_names if found.files.get(name) != wanted.files.get(name))
    return f"in {names}" if names else "in the manifest's hashes"


def check_hashes(stage: Stage, commands: Commands) -> list[str]:
    """What ``glmconv check --hash`` finds wrong with the scene's result."""
    checked = commands.run("check", stage.dst, "--hash")
    return (
        [f"check --hash ends with {checked.code}: {checked.out} {last_words(checked)}"]
        if checked.code
        else []
    )


def chosen(calls: Sequence[Call]) -> list[int]:
    """A sample of the places: one of each kind of call on each kind of file."""
    first: dict[tuple[str, ...], int] = {}
    for number, call in enumerate(calls, 1):
        first.setdefault((call.name, call.detail, _kind(call.path), _kind(call.other)), number)
    return sorted(first.values())


def _kind(path: str) -> str:
    """The folder and the suffix: files of one folder and format are written and removed alike."""
    folder, name = os.path.split(path)
    return path if name.startswith(".") else f"{folder}/{os.path.splitext(name)[1] or name}"


class Theatre:
    """Plays scenes on several servers at once, each in a folder of its own."""

    def __init__(self, root: Path, servers: int = 2) -> None:
        self._root = root
        self._servers = [Commands() for _ in range(servers)]
        self.sources = Sources(root / "src", self._servers[0])
        self._free = list(range(servers))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def __enter__(self) -> Theatre:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, scene: Scene, *, every: bool, errno: int = 0) -> tuple[Calm, list[Place]]:
        """All places of a scene, or a sample: killed there one after the other, or failing with ``errno``."""
        calm = calm_run(self._stage(scene, 0))
        numbers = list(range(1, len(calm.calls) + 1)) if every else chosen(calm.calls)

        def take(server: int) -> list[Place]:
            stage = self._stage(scene, server)
            places = []
            for at, number in enumerate(numbers[server :: len(self._servers)]):
                place = play_failure(stage, calm, number, errno) if errno else play(stage, calm, number)
                if every or at % 4 == 0:  # the bytes were compared already
                    place.problems += check_hashes(stage, self._servers[server])
                places.append(place)
            return places

        with ThreadPoolExecutor(len(self._servers)) as pool:
            places = [place for found in pool.map(take, range(len(self._servers))) for place in found]
        return calm, sorted(places, key=lambda place: place.number)

    def _stage(self, scene: Scene, server: int) -> Stage:
        # Folders of the same depth and name length: the calls must not differ.
        return Stage(scene, self.sources, self._root / f"stage{server}" / "there", self._servers[server])
