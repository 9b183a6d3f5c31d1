"""Plays scenes: an undisturbed run, runs that are killed or that meet an error, and what must hold after."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fs_calls import Call
from tests.support.kill_points import Commands, Run
from tests.support.kill_scenes import TRACKER, Scene, Sources, Stage, Tree, Unit, tree

LATE = 2.0
"""Seconds in which the files that a process had open are closed on a network filesystem."""

TRIES = 4
"""Runs that may be spent on one place: a run may record its finished work in fewer calls than the first."""


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
    occurrence = calm.calls[:number].count(place.call)
    while not place.hit and place.runs < TRIES:
        stage.prepare(calm.middle)
        killed = stage.run(kill_at=(place.call, occurrence))
        place.runs += 1
        place.hit = killed.was_killed and killed.killed_at == place.call
    if not place.hit:
        place.problems.append(f"never made: {killed.code}")
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
