"""Conversions on a filesystem with a network's manners (``tests/support/fuse_fs.py``): removed open files
stay in their directory, there may be no locks, names cannot be exchanged, directories cannot be flushed,
reads and writes are short, and any call may fail.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kill_plays import Calm, calm_run, chosen, finish, judge_failed, play
from tests.support.kill_points import Commands
from tests.support.kill_scenes import Scene, Sources, Stage, after_records, memory_folder, removed
from tests.support.network import Fault, Network, mounted_network

KINDS = ("megatron", "hf")
FAULTS = {
    "create": (errno.EIO, errno.ENOSPC),
    "flush": (errno.EIO,),
    "fsync": (errno.EIO, errno.ENOSPC),
    "fsyncdir": (errno.EIO,),
    "getattr": (errno.ESTALE,),
    "mkdir": (errno.ENOSPC,),
    "open": (errno.ESTALE,),
    "opendir": (errno.EIO,),
    "readdir": (errno.ESTALE,),
    "rename": (errno.EIO, errno.ESTALE),
    "rmdir": (errno.EIO,),
    "statfs": (errno.EIO,),
    "truncate": (errno.ENOSPC,),
    "unlink": (errno.EIO,),
    "write": (errno.EIO, errno.ENOSPC, errno.ESTALE),
}

TIMES = {errno.EIO: 1, errno.ENOSPC: 1, errno.ESTALE: 2}
"""Failures in a row: the kernel itself looks a path up again when it is told ESTALE."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="glmconv-network-", dir=memory_folder()))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def sources(folder: Path, commands: Commands) -> Sources:
    return Sources(folder / "src", commands)


@pytest.fixture(scope="module")
def locking(folder: Path) -> Iterator[Network]:
    """One with locks, where a run need not wait to see whether it is alone."""
    (folder / "locking").mkdir()
    with mounted_network(folder / "locking", locks=True) as network:
        yield network


@pytest.fixture(scope="module")
def lockless(folder: Path) -> Iterator[Network]:
    (folder / "lockless").mkdir()
    with mounted_network(folder / "lockless") as network:
        yield network


@pytest.fixture
def network(locking: Network) -> Iterator[Network]:
    locking.calm()
    yield locking
    locking.calm()


@pytest.fixture(scope="module")
def local(folder: Path, sources: Sources, commands: Commands) -> dict[str, Calm]:
    """The results on a local filesystem."""
    return {to: calm_run(Stage(Scene(to), sources, folder / "local" / to, commands)) for to in KINDS}


def staged(scene: Scene, sources: Sources, network: Network, commands: Commands) -> Stage:
    return Stage(scene, sources, network.path / "there", commands, closes_late=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", KINDS)
def test_same_bytes_without_locks(
    lockless: Network, sources: Sources, commands: Commands, local: dict[str, Calm], to: str, overwrite: bool
) -> None:
    stage = staged(Scene(to, overwrite=overwrite), sources, lockless, commands)
    lockless.calm()
    assert calm_run(stage).new == local[to].new
    assert lockless.calls()["flock:failed"] == 0, "the lock was not even asked for"


@pytest.mark.parametrize("to", KINDS)
def test_same_bytes_by_short_reads_and_writes(
    network: Network, sources: Sources, commands: Commands, local: dict[str, Calm], to: str
) -> None:
    """Source and destination are both on it."""
    removed(network.path / "src")
    there = Sources(network.path / "src", commands)
    network.arm(Fault("read", most=3001), Fault("write", most=1009), Fault("rename", delay=0.05))
    assert calm_run(staged(Scene(to), there, network, commands)).new == local[to].new


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", KINDS)
def test_killed_run_is_finished(
    network: Network, sources: Sources, commands: Commands, to: str, overwrite: bool
) -> None:
    stage = staged(Scene(to, overwrite=overwrite, exchange=False), sources, network, commands)
    calm = calm_run(stage)
    published = after_records(calm.calls, 0.99)
    late = [number for number in chosen(calm.calls) if number >= published]
    places = [play(stage, calm, number) for number in (*chosen(calm.calls)[: -len(late) : 9], *late[::2])]
    assert [str(place) for place in places if place.problems] == []


@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize("to", KINDS)
def test_failing_call_ends_clearly_and_the_same_command_finishes(
    network: Network, sources: Sources, commands: Commands, to: str, op: str
) -> None:
    stage = staged(Scene(to, overwrite=True, exchange=False), sources, network, commands)
    stage.prepare(0)
    network.arm()
    calm = calm_run(stage)
    problems: list[str] = []
    for number in FAULTS[op]:
        for share in (0.0, 0.5, 0.99):
            stage.prepare(0)
            network.arm()
            assert stage.run().code == 0
            count = network.calls()[op]
            stage.prepare(0)
            network.arm(Fault(op, errno=number, after=int(count * share), times=TIMES[number]))
            done = stage.run()
            met = network.calls()[f"{op}:failed"]
            network.calm()
            found: list[str] = []
            judge_failed(done, found)
            finish(stage, calm, found)
            if not met and count:
                found.append(f"the fault was not met (of {count} calls)")
            problems += [f"{op} {errno.errorcode[number]} at {share}: {problem}" for problem in found]
    assert problems == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("op", ["open", "read"])
@pytest.mark.parametrize("to", KINDS)
def test_failing_source_ends_clearly(
    network: Network,
    sources: Sources,
    commands: Commands,
    local: dict[str, Calm],
    to: str,
    op: str,
    number: int,
) -> None:
    copy = network.path / f"failing-{to}-{op}-{number}"
    shutil.copytree(sources.of(to), copy)
    out = network.path / f"out-{to}-{op}-{number}"
    network.arm()
    assert commands.run("convert", copy, network.path / f"whole-{to}-{op}-{number}", "--to", to).code == 0
    count = network.calls()[op]
    codes = []
    for after in (0, count // 3, count // 2):
        network.arm(Fault(op, f"/{copy.name}/*", number, after=after, times=TIMES[number]))
        done = commands.run("convert", copy, out, "--to", to)
        network.calm()
        codes.append(done.code)
        if done.code == 0:  # it was read again
            removed(out)
            continue
        assert done.code == 3, done.err
        assert "Traceback" not in done.err
        assert any(path.name in done.err for path in copy.rglob("*")), done.err
        assert "try:" in done.err, done.err
        assert not out.exists()
    assert any(codes), "no fault was met"
    assert commands.run("convert", copy, out, "--to", to).code == 0
    removed(copy)
