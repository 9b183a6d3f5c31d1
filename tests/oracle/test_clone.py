"""Conversions that share blocks instead of copying bytes, on XFS and btrfs that the tests mount."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import glmconv.engine.clone as clone_module
from glmconv.basics.errors import DataError, GlmconvError, StorageError
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import CopyMode, Stop
from glmconv.engine.clone import MIN_CLONE
from glmconv.plan.planner import TargetOptions
from tests.support import clone_jobs, mcore_run
from tests.support.checkpoints import make_proportioned, raw_config
from tests.support.conversions import assert_same_bytes, files_of
from tests.support.mounts import free_bytes, mounted, used_bytes
from tests.support.plain import (
    Meddler,
    Plain,
    edit_header,
    plain,
    plain_of,
    refused,
    shards_of,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
IMAGE = 14 * GIB
MARGIN = 256 << 20
"""Bytes left free on a disk that is too small for a copy."""

QUICK = RunOptions(hash_mode="none")


def glmconv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glmconv", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def report_of(*arguments: str | Path) -> dict[str, Any]:
    """The JSON report of a conversion from the command line."""
    done = glmconv("convert", *arguments, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def reflink(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem that can share blocks between files."""
    with mounted(request.param, tmp_path_factory.mktemp(request.param), IMAGE) as point:
        yield point


@pytest.fixture
def folder(reflink: Path) -> Iterator[Path]:
    path = reflink / "test"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@dataclass(slots=True)
class Cloned:
    """Gigabytes of random data, converted with ``--hash none``; ``growth`` is what that took on the disk."""

    hf: Path
    root: Path
    size: int
    growth: int
    report: dict[str, Any]

    @property
    def unit(self) -> Path:
        return self.root / "release"


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def cloned_share(report: dict[str, Any]) -> float:
    moved = report["bytes"]
    return float(moved["cloned"] / sum(moved[way] for way in ("cloned", "copied", "computed", "zero")))


def say(what: str, point: Path, report: dict[str, Any], growth: int, size: int) -> None:
    work = report["seconds"] - report["plan_seconds"]
    print(
        f"\n{what} on {point.name}, {size / 1e9:.2f} GB: {work:.2f} s of work, "
        f"{100 * cloned_share(report):.2f} % cloned, {100 * growth / size:.3f} % extra space"
    )


@pytest.fixture(scope="module")
def converted(reflink: Path) -> Iterator[Cloned]:
    """GLM-5.2's widths and proportions."""
    work = reflink / "gigabytes"
    work.mkdir()
    hf = make_proportioned(work / "hf", 1.0)
    size, before = bytes_of(hf), used_bytes(work)
    report = report_of(hf, work / "megatron", "--to", "megatron", "--hash", "none")
    growth = used_bytes(work) - before
    say("HF to Megatron", reflink, report, growth, size)
    yield Cloned(hf, work / "megatron", size, growth, report)
    shutil.rmtree(work)


def fill(directory: Path, filler: Path) -> None:
    """Leave next to no space (files that were just removed may still give some back)."""
    with filler.open("wb") as file:
        size = 0
        for _ in range(3):
            os.sync()
            time.sleep(0.5)
            spare = max(1, free_bytes(directory) - MARGIN)
            os.posix_fallocate(file.fileno(), size, spare)
            size += spare


class TestGigabytes:
    def test_it_takes_next_to_no_space(self, converted: Cloned) -> None:
        assert converted.size > 10**9
        assert converted.growth <= 0.02 * converted.size

    def test_nearly_all_is_cloned_and_nothing_is_read_for_hashes(self, converted: Cloned) -> None:
        assert cloned_share(converted.report) > 0.995
        assert converted.report["copying"] == {
            "mode": "auto", "not_cloned": "", "hash": "none", "reread_bytes": 0, "reread_seconds": 0.0,
        }  # fmt: skip

    def test_the_bytes_are_those_of_a_copy(self, converted: Cloned) -> None:
        copy = converted.root.parent / "copy"
        report = report_of(converted.hf, copy, "--to", "megatron", "--hash", "none", "--copy-mode", "copy")
        assert report["bytes"]["cloned"] == 0
        assert_same_bytes(converted.unit, copy / "release")
        shutil.rmtree(copy)

    def test_megatron_core_loads_it(self, converted: Cloned) -> None:
        expert, layer = "model.layers.2.mlp.experts.1", "decoder.layers.2.mlp.experts.experts"
        places: list[tuple[str, list[int], int, int, str]] = [
            ("embedding.word_embeddings.weight", [], 0, 8192, "model.embed_tokens.weight"),
            (f"{layer}.linear_fc1.weight", [1], 0, 2048, f"{expert}.gate_proj.weight"),
            (f"{layer}.linear_fc1.weight", [1], 2048, 2048, f"{expert}.up_proj.weight"),
            (f"{layer}.linear_fc2.weight", [1], 0, 6144, f"{expert}.down_proj.weight"),
        ]
        index = json.loads((converted.hf / "model.safetensors.index.json").read_text())["weight_map"]
        samples = [[*place[:4], str(converted.hf / index[place[4]]), place[4]] for place in places]
        found = mcore_run.run(
            clone_jobs.load_plainly,
            lane="0.16.1",
            arguments={"unit": str(converted.unit), "samples": samples},
        )[0]
        assert found["differing"] == []
        assert found["bytes"] == converted.report["ledger"]["stored_bytes"]

    def test_back_with_the_sources_sharding_is_the_source(self, converted: Cloned, reflink: Path) -> None:
        back, before = converted.root.parent / "back", used_bytes(reflink)
        report = report_of(converted.root, back, "--to", "hf", "--hash", "none")
        say("Megatron to HF", reflink, report, used_bytes(reflink) - before, converted.size)
        assert cloned_share(report) >= 0.9
        assert_same_bytes(converted.hf, back)
        shutil.rmtree(back)

    def test_hashing_reads_each_byte_once_and_says_so(self, converted: Cloned) -> None:
        hashed = converted.root.parent / "hashed"
        report = report_of(converted.hf, hashed, "--to", "megatron")
        assert cloned_share(report) > 0.995
        assert report["copying"]["hash"] == "full"
        assert report["copying"]["reread_bytes"] == report["bytes"]["cloned"]
        assert_same_bytes(converted.unit, hashed / "release")
        shutil.rmtree(hashed)

    def test_other_shards_are_cloned_too_where_a_file_can_match(self, converted: Cloned) -> None:
        """The header is padded: one shift for all tensors of a file."""
        other, modes = converted.root.parent / "other", ("auto", "copy")
        options = ("--to", "hf", "--hash", "none", "--max-shard-size", "400MB", "--copy-mode")
        report, _ = [report_of(converted.root, other / mode, *options, mode) for mode in modes]
        assert cloned_share(report) > 0.5
        assert_same_bytes(other / "auto", other / "copy")
        shutil.rmtree(other)

    def test_a_disk_too_small_for_a_copy_is_no_hindrance(self, converted: Cloned) -> None:
        work = converted.root.parent
        filler, out = work / "filler", work / "onto-a-full-disk"
        fill(work, filler)
        try:
            arguments = ("convert", converted.hf, out, "--to", "megatron", "--hash", "none", "--copy-mode")
            refusal = glmconv(*arguments, "copy")
            assert refusal.returncode == 3
            assert "bytes are needed" in refusal.stderr
            done = glmconv(*arguments, "auto")
            assert done.returncode == 0, done.stderr
        finally:
            filler.unlink()
        assert_same_bytes(converted.unit, out / "release")
        shutil.rmtree(out)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path_factory.mktemp("memory"), 64 << 20) as point:
        yield point


class TestWhereItCannot:
    @pytest.fixture
    def small(self, folder: Path) -> Path:
        return plain("glm-5.2").write(folder / "hf")

    def test_clone_refuses_before_any_work_and_says_why(self, small: Path, memory: Path) -> None:
        done = glmconv("convert", small, memory / "out", "--to", "megatron", "--copy-mode", "clone")
        assert done.returncode == 3
        assert "source and destination are on different filesystems" in done.stderr
        assert "--copy-mode auto" in done.stderr
        assert os.listdir(memory) == []

    def test_clone_refuses_on_a_filesystem_that_cannot(self, memory: Path) -> None:
        hf = plain("qwen3").write(memory / "hf")
        run = RunOptions(copy_mode="clone")
        refused(hf, memory / "out", StorageError, "cannot share extents between files", run=run)
        shutil.rmtree(hf)

    def test_auto_copies_and_says_why(self, small: Path, memory: Path) -> None:
        report = report_of(small, memory / "out", "--to", "megatron")
        assert report["bytes"]["cloned"] == 0
        assert "different filesystems" in report["copying"]["not_cloned"]
        done = glmconv("convert", small, memory / "out", "--to", "megatron", "--overwrite", "--hash", "none")
        assert "different filesystems" in done.stdout
        assert "none asked for" in done.stdout
        shutil.rmtree(memory / "out")

    def test_doctor_tells_one_place_from_the_other(self, folder: Path, memory: Path) -> None:
        said = [json.loads(glmconv("doctor", path, "--json").stdout)["path"] for path in (folder, memory)]
        assert said[0]["cloning"].startswith("works")
        assert "cannot share extents" in said[1]["cloning"]


def grouped() -> Plain:
    """Query, key and value rows are grouped: some of their blocks can be shared, some cannot."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 4096, "num_hidden_layers": 3}
    heads = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    return plain_of(raw_config("qwen3") | sizes | heads)


def indexed() -> Plain:
    """Halves of every index head change places in some dialects."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256, "vocab_size": 4096}
    heads = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "qk_head_dim": 128, "index_head_dim": 128}
    return plain_of(raw_config("glm-5.2") | sizes | heads | {"q_lora_rank": 512})


MOVED = {"grouped": (grouped, "mcore"), "halves": (indexed, "slime"), "as-they-are": (indexed, "mcore")}


@pytest.mark.parametrize("case", MOVED)
def test_every_mode_gives_the_same_bytes_there_and_back(folder: Path, case: str) -> None:
    make, dialect = MOVED[case]
    hf = make().write(folder / "hf")
    modes: tuple[CopyMode, ...] = ("copy", "auto", "clone")
    for mode in modes:
        run, target = RunOptions(copy_mode=mode, hash_mode="none"), TargetOptions("megatron", dialect)
        there = convert(hf, folder / mode, target=target, run=run)
        back = convert(folder / mode, folder / f"{mode}-back", target=TargetOptions("hf"), run=run)
        for report in (there, back):
            assert (report.steps["cloned"] > report.steps["copied"]) == (mode != "copy")
        assert_same_bytes(hf, back.path)
        assert_same_bytes(folder / "copy" / "release", there.path)


class Refusing:
    """The kernel's call, refused from one range on, or for that range alone."""

    def __init__(self, code: int, number: int, lasting: bool) -> None:
        self.real, self.code, self.number, self.lasting = clone_module.clone_range, code, number, lasting
        self.count = self.refused = self.done = 0

    def __call__(self, source_fd: int, source_offset: int, target_fd: int, offset: int, size: int) -> None:
        if size >= MIN_CLONE:  # a smaller one is a probe
            self.count += 1
            if self.count == self.number or (self.lasting and self.count > self.number):
                self.refused += size
                raise OSError(self.code, os.strerror(self.code))
            self.done += size
        self.real(source_fd, source_offset, target_fd, offset, size)


@pytest.fixture(scope="module")
def copied(reflink: Path) -> Iterator[tuple[Path, Path]]:
    """A checkpoint and what a copy makes of it."""
    work = reflink / "halfway"
    hf = indexed().write(work / "hf")
    yield hf, convert(hf, work / "copy", run=RunOptions(copy_mode="copy")).path
    shutil.rmtree(work)


class TestRefusedHalfway:
    @pytest.mark.parametrize("lasting", [False, True])
    @pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSPC])
    def test_auto_falls_back_range_by_range(
        self,
        folder: Path,
        copied: tuple[Path, Path],
        monkeypatch: pytest.MonkeyPatch,
        code: int,
        lasting: bool,
    ) -> None:
        hf, copy = copied
        calls = Refusing(0, 0, False)
        monkeypatch.setattr(clone_module, "clone_range", calls)
        convert(hf, folder / "all", run=QUICK)
        number = random.Random(code).randint(2, calls.count - 1)
        refusing = Refusing(code, number, lasting)
        refusing.real = calls.real
        monkeypatch.setattr(clone_module, "clone_range", refusing)
        report = convert(hf, folder / "out", run=QUICK)
        assert report.outcome is not None
        assert refusing.refused > 0
        assert report.steps["cloned"] == refusing.done
        assert os.strerror(code) in report.outcome.clone_reason
        assert_same_bytes(copy, report.path)

    def test_clone_ends_with_an_error_and_resumes(
        self, folder: Path, copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hf, copy = copied
        run = RunOptions(copy_mode="clone", hash_mode="none", journal_bytes=1 << 16)
        refusing = Refusing(errno.ENOSPC, 60, True)
        with monkeypatch.context() as patch:
            patch.setattr(clone_module, "clone_range", refusing)
            with pytest.raises(StorageError, match="No space left"):
                convert(hf, folder / "out", run=run)
        assert not (folder / "out").exists()
        report = convert(hf, folder / "out", run=run)
        assert report.steps["reused"] > 0
        assert_same_bytes(copy, report.path)


DRIVER = """
import json, sys, time
from pathlib import Path
from glmconv.commands.convert import RunOptions, convert
from glmconv.engine import Stop
src, dst, pause = sys.argv[1:]
class Slow(Stop):
    def is_set(self):
        time.sleep(float(pause))
        return super().is_set()
run = RunOptions(copy_mode="clone", hash_mode="none", journal_bytes=1 << 16)
print(json.dumps(convert(Path(src), Path(dst), run=run, stop=Slow()).steps))
"""


def start(src: Path, dst: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(src), str(dst), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill_when(journal: Path, size: float, process: subprocess.Popen[str]) -> None:
    """SIGKILL once the journal tells of that much."""
    while process.poll() is None:
        if journal.exists() and journal.stat().st_size >= size:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.001)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"


def journal_sizes(hf: Path, dst: Path, journal: Path, run: RunOptions) -> tuple[int, int]:
    """Bytes of the journal's header, and of the whole when an undisturbed run ends."""
    seen: list[bytes] = []
    convert(hf, dst, run=run, progress=lambda step: seen.append(journal.read_bytes()))
    shutil.rmtree(dst)
    return seen[-1].find(b"\n") + 1, len(seen[-1])


def test_killed_clones_resume_to_the_same_bytes(folder: Path) -> None:
    hf, dst = indexed().write(folder / "hf"), folder / "out"
    copy = convert(hf, folder / "copy", run=RunOptions(copy_mode="copy", hash_mode="none"))
    journal = folder / ".out.glmconv-release.partial" / "journal"
    run = RunOptions(copy_mode="clone", hash_mode="none", journal_bytes=1 << 16)
    header, whole = journal_sizes(hf, dst, journal, run)
    reused = []
    for share in (0.1, 0.3, 0.5, 0.7):
        for again in (share, share + 0.15):
            kill_when(journal, header + (whole - header) * again, start(hf, dst, 0.002))
            assert not dst.exists()
        text, _ = start(hf, dst, 0.0).communicate()
        steps = json.loads(text)
        reused.append(steps["reused"])
        assert steps["cloned"] > steps["copied"] or steps["reused"] == copy.steps["copied"]
        assert_same_bytes(copy.path, dst / "release")
        shutil.rmtree(dst)
    # A kill may come after the last record of the journal: then all is reused, in one of four at most.
    assert all(0 < size <= copy.steps["copied"] for size in reused)
    assert sum(size < copy.steps["copied"] for size in reused) >= 3


def truncated(hf: Path) -> None:
    os.truncate(shards_of(hf)[1], shards_of(hf)[1].stat().st_size - 5000)


def missing(hf: Path) -> None:
    shards_of(hf)[0].unlink()


def overlapping(hf: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name]["shape"][0] += 1

    edit_header(shards_of(hf)[0], edit)


class TestBadInput:
    RUN = RunOptions(copy_mode="clone", hash_mode="none", journal_bytes=1 << 16, workers=1)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [(truncated, "truncated"), (missing, "does not exist"), (overlapping, "needs")],
        ids=["truncated", "missing", "overlapping"],
    )
    def test_refused_before_any_work(self, folder: Path, damage: Callable[[Path], None], words: str) -> None:
        hf = indexed().write(folder / "hf")
        damage(hf)
        refused(hf, folder / "out", DataError, words, run=self.RUN)

    @pytest.mark.parametrize(
        ("deed", "words"),
        [
            (os.utime, "modification time"),
            (lambda shard: os.truncate(shard, 5000), "the source shrank"),
        ],
        ids=["touched", "truncated"],
    )
    def test_source_that_changes_meanwhile(
        self, folder: Path, deed: Callable[[Path], None], words: str
    ) -> None:
        hf = indexed().write(folder / "hf")
        shard = shards_of(hf)[-1]
        stop: Stop = Meddler(lambda: deed(shard), after=20)
        refused(hf, folder / "out", DataError, words, run=self.RUN, stop=stop, meddled=True)

    def test_source_that_shrinks_under_a_clone(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel refuses a range behind the end: an error, and no half of a checkpoint."""
        hf = indexed().write(folder / "hf")
        real, seen = clone_module.clone_range, [0]

        def shrink(source_fd: int, source_offset: int, target_fd: int, offset: int, size: int) -> None:
            seen[0] += size >= MIN_CLONE
            if seen[0] == 30:
                os.truncate(f"/proc/self/fd/{source_fd}", source_offset + size // 2)
            real(source_fd, source_offset, target_fd, offset, size)

        monkeypatch.setattr(clone_module, "clone_range", shrink)
        with pytest.raises(GlmconvError):
            convert(hf, folder / "out", run=QUICK)
        assert not (folder / "out").exists()

    def test_an_existing_destination_stays(self, folder: Path) -> None:
        hf = indexed().write(folder / "hf")
        made = convert(hf, folder / "out", run=self.RUN).path
        before = {name: path.stat().st_mtime_ns for name, path in files_of(made).items()}
        refused(hf, folder / "out", StorageError, "exists already", run=self.RUN)
        assert {name: path.stat().st_mtime_ns for name, path in files_of(made).items()} == before
