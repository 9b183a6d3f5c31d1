"""Thousands of broken inputs end in success or a GlmconvError (``scripts/fuzz.py`` runs more)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.errors import GlmconvError
from tests.support.plain import ROOT

import fuzz  # isort: skip  (on the path by the line above)

pytestmark = pytest.mark.slow

COUNT = 1500


def test_every_broken_input_ends_in_success_or_a_clear_error() -> None:
    command = [sys.executable, "scripts/fuzz.py", "--count", str(COUNT), "--seed", "7"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print("\n" + done.stdout)
    lines = re.findall(r"^ *([\d,]+) (\w+: \w+)$", done.stdout, re.MULTILINE)
    counts = {name: int(number.replace(",", "")) for number, name in lines}
    assert sum(counts.values()) == COUNT
    # Mutations that nothing notices, or that nothing survives, would prove little.
    assert counts["convert: success"] > COUNT / 20
    assert counts["convert: DataError"] > COUNT / 5
    assert re.search(r"inputs of seed 7 in .*: 0 bugs", done.stdout)


@pytest.fixture
def bases(tmp_path: Path) -> list[fuzz.Base]:
    (tmp_path / "work").mkdir()
    return fuzz.make_bases(tmp_path / "work")


def run(bases: list[fuzz.Base], count: int) -> fuzz.Tally:
    tally = fuzz.Tally()
    for number in range(count):
        fuzz.one(number, 3, bases, bases[0].path.parent, tally)
    return tally


class TestTheFuzzerItself:
    """It must be able to find something."""

    def test_same_seed_gives_the_same_outcomes(self, bases: list[fuzz.Base]) -> None:
        assert run(bases, 40).ended == run(bases, 40).ended

    def test_sound_bases_are_left_as_they_were(self, bases: list[fuzz.Base]) -> None:
        before = [fuzz._state(base.path) for base in bases]
        run(bases, 40)
        after = [fuzz._state(base.path) for base in bases]
        names = [[(name, size) for name, size, _ in states] for states in (*before, *after)]
        assert names[: len(bases)] == names[len(bases) :]

    def test_another_exception_is_a_bug(
        self, bases: list[fuzz.Base], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: Any) -> None:
            raise KeyError("weight_map")

        monkeypatch.setattr(fuzz, "_convert", fail)
        tally = run(bases, 20)
        assert any("KeyError: 'weight_map'" in bug and "--first" in bug for bug in tally.bugs)

    def test_hang_is_a_bug(self, bases: list[fuzz.Base], monkeypatch: pytest.MonkeyPatch) -> None:
        def sleep() -> None:
            time.sleep(5)

        monkeypatch.setattr(fuzz, "SECONDS", 0.1)
        before = signal.signal(signal.SIGALRM, fuzz._hang)
        try:
            assert "Hang: over 0.1 s" in fuzz._ended(sleep)
        finally:
            signal.signal(signal.SIGALRM, before)

    def test_litter_is_a_bug(self, bases: list[fuzz.Base], monkeypatch: pytest.MonkeyPatch) -> None:
        def litter(src: Path, out: Path, *others: Any) -> None:
            out.mkdir()
            raise GlmconvError("refused, but too late")

        monkeypatch.setattr(fuzz, "_convert", litter)
        assert any("bug: left ['out']" in bug for bug in run(bases, 20).bugs)

    def test_source_that_is_touched_is_a_bug(
        self, bases: list[fuzz.Base], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fuzz, "_convert", lambda src, *others: (src / "new").touch())
        tally = run(bases, 20)
        assert any("the source was touched" in bug for bug in tally.bugs)
