"""A run killed at any system call that changes the filesystem is finished by the same command.

Every such call of a run is enumerated by tracing it; each is a place that another run is killed at, by a
real SIGKILL, before the call is made. By default a sample of the places (one of each kind of call on
each kind of file); all of them with ``GLMCONV_KILL_EVERYWHERE=1`` or ``scripts/kill_everywhere.py``.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kill_plays import Theatre
from tests.support.kill_scenes import Scene, memory_folder, scenes

EVERY = bool(os.environ.get("GLMCONV_KILL_EVERYWHERE"))


def sample() -> list[Scene]:
    """Each situation once, every other one with two workers; what hf has in common with megatron, once."""
    pairs = zip(scenes((1,)), scenes((2,)), strict=True)
    found = [pair[at % 2] for at, pair in enumerate(pairs)]
    return [one for one in found if one.to == "megatron" or not (one.deep or (one.overwrite and one.resumed))]


SCENES = scenes() if EVERY else sample()
FAILING = [one for one in SCENES if EVERY or not (one.deep or one.resumed or one.beside or not one.exchange)]
NUMBERS = (errno.EIO, errno.ENOSPC) if EVERY else (errno.EIO,)


@pytest.fixture(scope="module")
def theatre() -> Iterator[Theatre]:
    folder = Path(tempfile.mkdtemp(prefix="glmconv-kill-", dir=memory_folder()))
    try:
        with Theatre(folder) as theatre:
            yield theatre
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_same_command_finishes_a_run_killed_anywhere(theatre: Theatre, scene: Scene) -> None:
    calm, places = theatre.play(scene, every=EVERY)
    wrong = [str(place) for place in places if place.problems]
    print(f"\n{scene}: {len(calm.calls)} calls change the filesystem; killed before {len(places)} of them")
    assert not wrong, f"{len(wrong)} of {len(places)} places:\n" + "\n".join(wrong[:20])
    assert all(place.hit for place in places)
    assert not theatre.sources.touched(), "a source was touched"


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("scene", FAILING, ids=str)
def test_same_command_finishes_a_run_in_which_any_call_failed(
    theatre: Theatre, scene: Scene, number: int
) -> None:
    _, places = theatre.play(scene, every=EVERY, errno=number)
    wrong = [str(place) for place in places if place.problems]
    assert not wrong, f"{len(wrong)} of {len(places)} places:\n" + "\n".join(wrong[:20])
    assert all(place.hit for place in places)
    assert not theatre.sources.touched(), "a source was touched"
