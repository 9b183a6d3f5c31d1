"""Kills and resumes give the same bytes, and nobody ever sees half a checkpoint.

Whole processes, killed with SIGKILL at a random fraction of the journal; and the command line's exit
codes, signals among them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from glmconv.basics.errors import DataError, StorageError
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Progress
from glmconv.plan.planner import TargetOptions
from tests.support.checkpoints import glm_moe_dsa_tensors, raw_config
from tests.support.plain import plain, shards_of

from checkpoint_headers import write_layout  # isort: skip  (on the path by the line above)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
JOURNAL_BYTES = 4 << 20
KILLS = 20
POLL = 0.001
PAUSE = 0.003
"""Seconds that a worker of a run to be killed rests before each step, so that the journal grows evenly
on a disk that is slow to flush."""

TRACKER = "latest_checkpointed_iteration.txt"

DRIVER = """
import json, sys, time
from pathlib import Path
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Stop
from glmconv.plan.planner import TargetOptions
src, dst, to, workers, journal_bytes, pause = sys.argv[1:]
class Slow(Stop):
    def is_set(self):
        time.sleep(float(pause))
        return super().is_set()
run = RunOptions(workers=int(workers), journal_bytes=int(journal_bytes))
stop = Slow() if float(pause) else None
outcome = convert(Path(src), Path(dst), target=TargetOptions(to=to), run=run, stop=stop).outcome
print(json.dumps({"reused": outcome.bytes_reused, "total": sum(map(len, outcome.leaves.values()))}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Some gigabytes pass through it: removed at once, not when pytest tidies up."""
    path = tmp_path_factory.mktemp("kill")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Path:
    """A checkpoint of some 180 MB: experts, indexers, MTP, tensors of many hash leaves."""
    sizes = {"hidden_size": 768, "intermediate_size": 1536, "moe_intermediate_size": 384}
    config = raw_config("glm-5.2") | sizes | {"n_routed_experts": 8, "vocab_size": 16384}
    random_bytes = np.random.Generator(np.random.SFC64(5))
    for path, start in write_layout(folder / "hf", config, glm_moe_dsa_tensors(config), 60_000_000).items():
        data = random_bytes.integers(0, 1 << 16, size=(path.stat().st_size - start) // 2, dtype=np.uint16)
        with path.open("r+b") as stream:
            stream.seek(start)
            stream.write((data & np.uint16(0xBFBF)).data)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    return folder / "hf"


@dataclass(slots=True)
class Calm:
    """A run that nobody disturbed: digests of its files, its manifest's hashes, its journal's size.

    ``header`` is the journal's first line, which tells of no finished work.
    """

    digests: dict[str, str]
    hashes: list[Any]
    header: int
    journal: int
    payload: int
    sizes: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def megatron(folder: Path, hf: Path) -> Path:
    return convert(hf, folder / "megatron").destination


@pytest.fixture(scope="module")
def calm(folder: Path, hf: Path, megatron: Path) -> dict[str, Calm]:
    """The undisturbed run of each direction."""
    return {
        "megatron": run_calmly(hf, folder / "calm", "megatron"),
        "hf": run_calmly(megatron, folder / "calm", "hf"),
    }


def run_calmly(src: Path, dst: Path, to: str, workers: int = 1) -> Calm:
    seen: list[tuple[int, int, int]] = []

    def look(progress: Progress) -> None:
        journal = journal_of(dst, to).read_bytes()
        seen.append((journal.find(b"\n") + 1, len(journal), progress.total))

    run = RunOptions(workers=workers, journal_bytes=JOURNAL_BYTES)
    report = convert(src, dst, target=TargetOptions(to=to), run=run, progress=look)
    result = Calm(digests(report.path), hashes(report.path), *seen[-1], sizes(report.path))
    shutil.rmtree(dst)
    return result


def staging_of(dst: Path, to: str) -> Path:
    """Where a run into a new directory works."""
    return dst.parent / f".{dst.name}.glmconv-{'release' if to == 'megatron' else 'hf'}.partial"


def journal_of(dst: Path, to: str) -> Path:
    return staging_of(dst, to) / "journal"


def unit_of(dst: Path, to: str) -> Path:
    return dst / "release" if to == "megatron" else dst


def sizes(unit: Path) -> dict[str, int]:
    files = (path for path in unit.rglob("*") if path.is_file())
    return {str(path.relative_to(unit)): path.stat().st_size for path in files if path.name != "glmconv.json"}


def digests(unit: Path) -> dict[str, str]:
    """A digest of every file but the manifest, which holds times."""
    return {name: xxhash.xxh3_128_hexdigest((unit / name).read_bytes()) for name in sizes(unit)}


def hashes(unit: Path) -> list[Any]:
    """What the manifest says of every file and payload."""
    found: list[Any] = json.loads((unit / "glmconv.json").read_text())["files"]
    return found


def start(src: Path, dst: Path, to: str, workers: int, pause: float = 0.0) -> subprocess.Popen[str]:
    numbers = (str(workers), str(JOURNAL_BYTES), str(pause * workers))
    command = [sys.executable, "-c", DRIVER, str(src), str(dst), to, *numbers]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def watch(
    process: subprocess.Popen[str], dst: Path, to: str, expected: Calm, until: Callable[[], bool]
) -> bool:
    """Look at the destination all the time until the process ends (False) or ``until`` holds (True)."""
    unit, tracker = unit_of(dst, to), dst / TRACKER
    while process.poll() is None:
        if unit.exists():
            assert sizes(unit) == expected.sizes, "half a checkpoint is at the destination"
            assert (unit / "glmconv.json").is_file()
        else:
            assert not tracker.exists(), "the tracker names a unit that is not there"
        if until():
            return True
        time.sleep(POLL)
    return False


def kill_at(fraction: float, src: Path, dst: Path, to: str, workers: int, expected: Calm) -> bool:
    """Start a run and kill it when its journal tells of that much; False where it was faster."""
    journal = journal_of(dst, to)
    journal_size = expected.header + fraction * (expected.journal - expected.header)

    def grown() -> bool:
        try:
            return journal.stat().st_size >= journal_size
        except FileNotFoundError:
            return False

    process = start(src, dst, to, workers, PAUSE)
    killed = watch(process, dst, to, expected, grown)
    process.kill()
    process.communicate()
    return killed and process.returncode == -signal.SIGKILL


def resume(src: Path, dst: Path, to: str, workers: int, expected: Calm) -> int:
    """Run to the end; returns the bytes that were not written again."""
    process = start(src, dst, to, workers)
    watch(process, dst, to, expected, lambda: False)
    text, _ = process.communicate()
    assert process.returncode == 0
    reused: int = json.loads(text)["reused"]
    return reused


def assert_same(dst: Path, to: str, expected: Calm) -> None:
    unit = unit_of(dst, to)
    assert digests(unit) == expected.digests
    assert hashes(unit) == expected.hashes
    assert not staging_of(dst, to).exists()
    if to == "megatron":
        assert (dst / TRACKER).read_text() == "release"


@pytest.mark.parametrize("to", ["megatron", "hf"])
@pytest.mark.parametrize("workers", [2, 7])
def test_any_number_of_workers_gives_the_same_bytes(
    folder: Path, hf: Path, megatron: Path, calm: dict[str, Calm], workers: int, to: str
) -> None:
    again = run_calmly(hf if to == "megatron" else megatron, folder / "workers", to, workers)
    assert again.digests == calm[to].digests
    assert again.hashes == calm[to].hashes


@pytest.mark.parametrize(("to", "kills"), [("megatron", KILLS), ("hf", KILLS // 4)])
def test_killed_runs_resume_to_the_same_bytes(
    folder: Path, hf: Path, megatron: Path, calm: dict[str, Calm], to: str, kills: int
) -> None:
    src, dst, expected = hf if to == "megatron" else megatron, folder / "killed", calm[to]
    rng = random.Random(20)
    reused = []
    for _ in range(kills):
        fraction = rng.uniform(0.02, 0.9)
        killed = kill_at(fraction, src, dst, to, rng.choice((1, 2, 7)), expected)
        reused.append(resume(src, dst, to, rng.choice((1, 2, 7)), expected) if killed else expected.payload)
        assert_same(dst, to, expected)
        shutil.rmtree(dst)
    partial = [size for size in reused if 0 < size < expected.payload]
    shares = ", ".join(f"{100 * size / expected.payload:.0f}" for size in reused)
    print(
        f"\n{kills} runs to {to} of {expected.payload:,} bytes killed with SIGKILL and resumed: "
        f"the same bytes and manifest hashes in all; {len(partial)} reused a part; per cent reused: {shares}"
    )
    assert len(partial) >= kills * 3 // 4


def test_killed_twice_in_a_row(folder: Path, hf: Path, calm: dict[str, Calm]) -> None:
    dst, expected = folder / "twice", calm["megatron"]
    assert kill_at(0.2, hf, dst, "megatron", 2, expected)
    assert kill_at(0.6, hf, dst, "megatron", 7, expected)
    assert 0 < resume(hf, dst, "megatron", 1, expected) < expected.payload
    assert_same(dst, "megatron", expected)
    shutil.rmtree(dst)


def test_killed_run_is_not_resumed_from_a_changed_source_or_by_another_plan(
    folder: Path, hf: Path, calm: dict[str, Calm]
) -> None:
    dst, expected = folder / "changed", calm["megatron"]
    assert kill_at(0.3, hf, dst, "megatron", 2, expected)
    with pytest.raises(StorageError, match="--dialect mcore there, slime here"):
        convert(hf, dst, target=TargetOptions(to="megatron", dialect="slime"))
    shard = shards_of(hf)[0]
    before = shard.stat()
    os.utime(shard)
    with pytest.raises(
        DataError, match="the source changed since the unfinished run here: the modification time"
    ):
        convert(hf, dst)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="the time of change"):  # a time set back may hide other content
        convert(hf, dst)
    assert not dst.exists()
    convert(hf, dst, run=RunOptions(overwrite=True))
    assert_same(dst, "megatron", expected)
    shutil.rmtree(dst)


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "glmconv", *map(str, arguments)]


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_line(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)


class TestCommandLine:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signal_stops_cleanly_and_the_same_command_resumes(
        self, folder: Path, hf: Path, number: signal.Signals, code: int
    ) -> None:
        dst = folder / "stopped"
        arguments = ("convert", hf, dst, "--to", "megatron", "-j", "1", "--json")
        process = subprocess.Popen(
            command_line(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not (staging_of(dst, "megatron") / "unit").exists():
            time.sleep(POLL)
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == code
        assert f"interrupted by signal {int(number)}" in errors
        assert "the same command again: it resumes" in errors
        assert "Traceback" not in errors
        assert not dst.exists()
        again = run_command(*arguments)
        assert again.returncode == 0
        assert (dst / "release" / ".metadata").is_file()
        shutil.rmtree(dst)

    @pytest.fixture
    def small(self, tmp_path: Path) -> Path:
        return plain("qwen3").write(tmp_path / "small")

    def test_0_for_done(self, small: Path, tmp_path: Path) -> None:
        done = run_command("convert", small, tmp_path / "out", "--to", "megatron")
        assert (done.returncode, done.stderr) == (0, "")
        assert "every byte" in done.stdout

    def test_1_for_wrong_data(self, small: Path, tmp_path: Path) -> None:
        os.truncate(shards_of(small)[0], 5000)
        done = run_command("convert", small, tmp_path / "out", "--to", "megatron")
        assert done.returncode == 1
        assert "truncated" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        "arguments",
        [("--to", "onnx"), ("--no-such-option",), ("-j", "0"), ("--max-shard-size", "5 apples"), ("extra",)],
    )
    def test_2_for_wrong_usage(self, small: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        done = run_command("convert", small, tmp_path / "out", *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr

    def test_3_for_storage(self, small: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        done = run_command("convert", small, tmp_path / "out", "--to", "hf")
        assert done.returncode == 3
        assert "exists already" in done.stderr
        assert os.listdir(tmp_path / "out") == ["mine"]
