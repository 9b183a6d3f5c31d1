"""A killed run of A is never continued by B, nor is A's unit taken for B's, unless the bytes are the same.

Each pair differs in one thing. A is killed by SIGKILL in its middle, when a part is finished and on
record. B, at the same destination, is then refused by name and changes nothing, or ends with exactly
the bytes and the manifest of an undisturbed run of B.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.kill_points import Commands, Run
from tests.support.kill_scenes import (
    JOURNAL_BYTES,
    MANIFEST,
    TRACKER,
    Tree,
    after_records,
    memory_folder,
    tree,
)
from tests.support.pairs import Pair, Words, Workshop
from tests.support.situations import SITUATIONS

VOLATILE = ("bytes", "copying", "peak_rss_anon", "seconds")
"""What a manifest tells of the run itself: a resumed one has other figures."""


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="glmconv-pair-", dir=memory_folder()))
    yield path
    shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run published: its unit's name (empty: the destination itself), files and manifest."""

    unit: str
    files: Tree
    manifest: dict[str, Any]


def published(dst: Path) -> dict[str, Result]:
    """The units at a destination, by name."""
    found = {}
    for unit in (dst, *(path for path in dst.glob("*") if path.is_dir())):
        files = tree(unit) or {}
        if files.pop(MANIFEST, None) is None:
            continue
        manifest = json.loads((unit / MANIFEST).read_bytes())
        stable = {name: value for name, value in manifest.items() if name not in VOLATILE}
        name = "" if unit == dst else unit.name
        found[name] = Result(name, files, stable)
    return found


def assert_published(dst: Path, *wanted: Result) -> None:
    """Exactly these units are there; otherwise tell which files and facts differ."""
    found = published(dst)
    for result in wanted:
        assert result.unit in found, f"there is no unit {result.unit!r}, only {list(found)}"
        other = found.pop(result.unit)
        files = _differing(other.files, result.files)
        facts = _differing(other.manifest, result.manifest)
        assert not files, f"other bytes in {files}; the manifest differs in {facts}"
        assert not facts, f"the same bytes, and a manifest of another run: it differs in {facts}"
    assert not found, f"there are more units: {list(found)}"


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = sorted(found.keys() | wanted.keys())
    return [name for name in names if found.get(name) != wanted.get(name)]


class Stage:
    """One destination, and the two commands on it."""

    def __init__(self, folder: Path, commands: Commands, pair: Pair) -> None:
        self.pair, self._commands = pair, commands
        self.parent = folder / "there"
        self.dst = self.parent / "out"

    def clear(self) -> None:
        shutil.rmtree(self.parent, ignore_errors=True)
        self.parent.mkdir()

    def run(self, words: Words, *more: str, traced: bool = False, kill: int = 0) -> Run:
        source, *options = words
        watched = [self.parent] if traced or kill else []
        arguments = ("convert", source, self.dst, *options, *more)
        workers = () if "-j" in options else ("-j", "1")
        return self._commands.run(
            *arguments, *workers, watched=watched, kill=kill, journal_bytes=JOURNAL_BYTES
        )

    def b(self, *more: str) -> Run:
        with self.pair.turn():
            return self.run(self.pair.b, *more)

    def kill_a(self, at: int) -> None:
        self.clear()
        killed = self.run(self.pair.a, kill=at)
        assert killed.was_killed, killed.err

    def held(self) -> Tree:
        """All that stands there, but for the lock (which tells of its last holder)."""
        found = tree(self.parent) or {}
        return {name: digest for name, digest in found.items() if not Path(name).name.startswith("lock")}

    def leftovers(self) -> list[str]:
        return [name for name in self.held() if "partial" in name or Path(name).name.startswith(".glmconv")]


@dataclass(frozen=True, slots=True)
class Calm:
    """Undisturbed runs: where A is to be killed, and the results. B may be refused in itself."""

    middle: int
    a: Result
    b: Result | None


def calm_runs(stage: Stage) -> Calm:
    stage.clear()
    done = stage.run(stage.pair.a, traced=True)
    assert done.code == 0, done.err
    (a,) = published(stage.dst).values()
    stage.clear()
    b = stage.b()
    return Calm(
        after_records(done.calls, 0.5), a, next(iter(published(stage.dst).values())) if b.code == 0 else None
    )


@pytest.mark.parametrize("name", SITUATIONS)
def test_killed_run_is_never_continued_by_another(folder: Path, commands: Commands, name: str) -> None:
    pair = SITUATIONS[name](Workshop(folder, commands))
    stage = Stage(folder, commands, pair)
    if pair.lasting:
        _once(stage)
        return
    calm = calm_runs(stage)
    _b_after_a_was_killed(stage, calm)
    _overwriting_b_after_a_was_killed(stage, calm)
    _b_after_a_has_finished(stage, calm)


def _once(stage: Stage) -> None:
    """The turn cannot be undone: A is killed, B runs, and an undisturbed B comes last."""
    stage.clear()
    traced = stage.run(stage.pair.a, traced=True)
    stage.kill_a(after_records(traced.calls, 0.5))
    before = stage.held()
    done = stage.b()
    found = published(stage.dst)
    if done.code:
        _assert_refused(stage, done, before, names=True)
    stage.clear()
    calm = stage.run(stage.pair.b)
    assert calm.code == 0, calm.err
    if not done.code:
        assert_published(stage.dst, *found.values())


def _b_after_a_was_killed(stage: Stage, calm: Calm) -> None:
    stage.kill_a(calm.middle)
    before = stage.held()
    done = stage.b("--json")
    if done.code == 0:
        assert calm.b is not None, "B alone is refused"
        assert_published(stage.dst, calm.b)
        if stage.pair.continues:
            assert done.json()["bytes"]["reused"] > 0, "the same work was done again"
        stage.kill_a(calm.middle)
    else:
        assert not stage.pair.continues, done.err
        _assert_refused(stage, done, before, names=calm.b is not None)
    again = stage.run(stage.pair.a, "--json")
    assert again.code == 0, again.err
    assert again.json()["bytes"]["reused"] > 0, "A was killed before anything was on record"
    assert_published(stage.dst, calm.a)
    assert stage.leftovers() == []


def _assert_refused(stage: Stage, done: Run, before: Tree, *, names: bool) -> None:
    """``names``: the refusal is about the two being different, and says in what."""
    assert done.code in (1, 3), done.err
    assert "Traceback" not in done.err
    assert "try:" in done.err, f"no way out is named: {done.err}"
    named = [word for word in stage.pair.says if word.lower() in done.err.lower()]
    assert named or not names, f"none of {stage.pair.says} is named: {done.err}"
    assert stage.held() == before, "the refused run changed something"


def _overwriting_b_after_a_was_killed(stage: Stage, calm: Calm) -> None:
    stage.kill_a(calm.middle)
    before = stage.held()
    done = stage.b("--overwrite")
    if calm.b is None:
        assert done.code in (1, 3), done.err
        assert stage.held() == before
        return
    assert done.code == 0, done.err
    assert_published(stage.dst, calm.b)
    if calm.b.unit == calm.a.unit:
        assert stage.leftovers() == []


def _b_after_a_has_finished(stage: Stage, calm: Calm) -> None:
    """Also where A was killed before its tracker: what looks finished is A's, not B's."""
    stage.clear()
    assert stage.run(stage.pair.a).code == 0
    (stage.dst / TRACKER).unlink(missing_ok=True)
    before = stage.held()
    done = stage.b()
    if done.code:
        assert done.code in (1, 3), done.err
        assert stage.held() == before, "the refused run changed something"
    else:
        assert calm.b is not None, "B alone is refused"
        assert_published(stage.dst, calm.b, *([calm.a] if calm.a.unit != calm.b.unit else []))
