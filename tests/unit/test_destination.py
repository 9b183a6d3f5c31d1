"""The destination: refused where it must be, and never half-written, whatever goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glmconv.basics.errors import DataError, Interrupted, StorageError, UsageError
from glmconv.commands.conversion_report import Report
from glmconv.commands.convert import RunOptions, convert
from glmconv.commands.diff import diff
from glmconv.engine import Progress, Stop
from glmconv.plan.draft import literal_file
from glmconv.plan.ledger import prove
from glmconv.plan.plan import Plan
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from tests.support.conversions import assert_same_bytes
from tests.support.plain import Meddler, Plain, plain, refused, shards_of, snapshot, without_privileges

HF = TargetOptions(to="hf")
STACKED = TargetOptions(to="hf-stacked")
AGAIN = RunOptions(overwrite=True)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return plain("qwen3").write(tmp_path / "hf")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


class TestApartFromTheSource:
    @pytest.mark.parametrize("run", [RunOptions(), AGAIN])
    @pytest.mark.parametrize("target", [HF, TargetOptions(to="megatron")])
    def test_is_the_source(self, hf: Path, run: RunOptions, target: TargetOptions) -> None:
        refused(hf, hf, UsageError, "the destination is the source itself", run=run, target=target)

    @pytest.mark.parametrize("run", [RunOptions(), AGAIN])
    def test_is_the_source_through_a_link(self, hf: Path, out: Path, run: RunOptions) -> None:
        out.symlink_to(hf)
        refused(hf, out, UsageError, "the source itself", run=run, target=HF)
        refused(out, hf, UsageError, "the source itself", run=run, target=HF)

    @pytest.mark.parametrize("target", [HF, TargetOptions(to="megatron")])
    def test_holds_what_the_source_links_to(self, hf: Path, tmp_path: Path, target: TargetOptions) -> None:
        """A directory of links with another config, made to be written over what it links to."""
        links = tmp_path / "links"
        links.mkdir()
        for file in hf.iterdir():
            if file.suffix == ".safetensors":
                (links / file.name).symlink_to(file)
            else:
                shutil.copy(file, links)
        before = snapshot(hf)
        refused(links, hf, UsageError, "files of the source lie inside", run=AGAIN, target=target)
        assert snapshot(hf) == before
        convert(links, tmp_path / "out", target=target)

    def test_is_the_source_spelt_differently(
        self, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "sub").mkdir()
        monkeypatch.chdir(tmp_path)
        for spelt in ("hf", "./hf/", "sub/../hf"):
            refused(hf, Path(spelt), UsageError, "the source itself", target=HF)

    @pytest.mark.parametrize("target", [HF, TargetOptions(to="megatron")])
    def test_is_inside_of_the_source(self, hf: Path, target: TargetOptions) -> None:
        refused(hf, hf / "a" / "b", UsageError, f"inside the source {hf}", target=target)
        assert not (hf / "a").exists()

    def test_is_inside_of_the_source_through_a_link(self, hf: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(hf)
        refused(hf, tmp_path / "link" / "out", UsageError, "inside the source", target=HF)

    def test_holds_the_source(self, hf: Path) -> None:
        refused(hf, hf.parent, UsageError, "is inside the destination", target=HF, run=AGAIN)

    def test_is_the_checkpoint_that_missing_tensors_come_from(self, hf: Path, tmp_path: Path) -> None:
        made = plain("qwen3")
        del made.tensors["model.norm.weight"]
        poor = made.write(tmp_path / "poor")
        source = SourceOptions(fill_missing_from=hf)
        refused(poor, hf, UsageError, "the source itself", source=source, target=HF, run=AGAIN)
        refused(poor, hf / "out", UsageError, "inside the source", source=source, target=HF)

    def test_is_the_directory_of_the_hf_config(self, hf: Path, tmp_path: Path) -> None:
        convert(hf, tmp_path / "root")
        source = SourceOptions(origin_hf_dir=hf)
        refused(tmp_path / "root", hf, UsageError, "the source itself", source=source, run=AGAIN)

    @pytest.mark.parametrize("address", ["hf://org/name", "s3://bucket/x"])
    def test_is_no_path(self, hf: Path, address: str) -> None:
        refused(hf, Path(address), UsageError, "is not a path on this machine")


class TestExisting:
    def test_checkpoint_is_not_replaced_unasked(self, hf: Path, out: Path) -> None:
        convert(hf, out, target=HF)
        refused(hf, out, StorageError, "the destination exists already", "--overwrite", target=HF)

    def test_other_things_are_not_replaced_even_when_asked(self, hf: Path, out: Path) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
        refused(hf, out, StorageError, "exists already", target=HF)
        refused(
            hf, out, StorageError, "files that are not a checkpoint's own", "thesis.tex", target=HF, run=AGAIN
        )

    def test_unit_is_not_replaced_unasked(self, hf: Path, out: Path) -> None:
        convert(hf, out)
        refused(hf, out, StorageError, "release", "the destination exists already")

    def test_file_at_the_destination(self, hf: Path, out: Path) -> None:
        out.write_text("a file")
        refused(hf, out, StorageError, "not a directory", target=HF)
        assert out.read_text() == "a file"

    def test_empty_directory_is_free(self, hf: Path, out: Path) -> None:
        out.mkdir()
        assert convert(hf, out, target=HF).path == out

    def test_other_units_of_the_root_stay_and_the_tracker_with_them(self, hf: Path, out: Path) -> None:
        convert(hf, out, target=TargetOptions(to="megatron", iteration=7))
        before = snapshot(out / "iter_0000007")
        report = convert(hf, out, target=TargetOptions(to="megatron", dialect="slime"))
        assert snapshot(out / "iter_0000007") == before
        assert (out / TRACKER).read_text() == "7"
        assert any("--set-tracker" in str(warning) for warning in report.warnings)
        moved = RunOptions(overwrite=True, set_tracker=True)
        convert(hf, out, target=TargetOptions(to="megatron", dialect="slime"), run=moved)
        assert (out / TRACKER).read_text() == "release"

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_failed_overwrite_leaves_the_old_one(self, hf: Path, out: Path, to: str) -> None:
        target = TargetOptions(to=to)
        convert(hf, out, target=target)
        shard = shards_of(hf)[0]
        stop = Meddler(lambda: os.utime(shard))
        refused(hf, out, DataError, shard.name, stop=stop, run=AGAIN, target=target, meddled=True)

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_overwrite_replaces_all_of_it(self, hf: Path, out: Path, tmp_path: Path, to: str) -> None:
        target = TargetOptions(to=to)
        other = plain("qwen3-moe")
        other.side["extra.txt"] = b"of the old one"
        convert(other.write(tmp_path / "other"), out, target=target)
        report = convert(hf, out, target=target, run=AGAIN)
        convert(hf, tmp_path / "fresh", target=target)
        assert_same_bytes(report.path, tmp_path / "fresh" / report.path.relative_to(out))
        assert sorted(os.listdir(tmp_path)) == ["fresh", "hf", "other", "out"]


class TestTwoAtOnce:
    def test_second_one_is_refused_and_harms_nothing(self, hf: Path, out: Path) -> None:
        messages = []

        def convert_again(progress: Progress) -> None:
            with pytest.raises(StorageError) as caught:
                convert(hf, out)
            messages.append(str(caught.value))

        report = convert(hf, out, progress=convert_again)
        assert f"busy: process {os.getpid()}" in messages[0]
        assert "wait for it to end" in messages[0]
        assert (report.path / ".metadata").is_file()
        assert sorted(os.listdir(out)) == [TRACKER, "release"]

    def test_destination_that_appears_meanwhile_is_not_replaced(self, hf: Path, out: Path) -> None:
        def appear(progress: Progress) -> None:
            if not out.exists():
                out.mkdir()
                (out / "theirs").write_text("theirs")

        with pytest.raises(StorageError, match="exists already"):
            convert(hf, out, target=HF, progress=appear)
        assert os.listdir(out) == ["theirs"]


@contextmanager
def tmpfs(point: Path, options: str) -> Iterator[Path]:
    """A filesystem in memory. Mounting needs root; without it the test fails, since it proves nothing."""
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def remount(point: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", point], check=True)


def many_files() -> Plain:
    """Side files that take a page each: a disk can be too small for them though the bytes fit."""
    made = plain("qwen3")
    made.side |= {f"LICENSE-{i}.txt": b"x" for i in range(60)}
    return made


class TestDisk:
    def test_too_small_by_the_preflight(self, hf: Path, tmp_path: Path) -> None:
        with tmpfs(tmp_path / "disk", "size=256k") as disk:
            refused(hf, disk / "a" / "b" / "out", StorageError, "bytes are needed and", "are free", target=HF)
            assert list(disk.iterdir()) == []

    @pytest.mark.parametrize(("target", "size"), [(HF, "600k"), (TargetOptions(to="megatron"), "720k")])
    def test_full_in_the_middle(self, tmp_path: Path, target: TargetOptions, size: str) -> None:
        hf = many_files().write(tmp_path / "hf")
        with tmpfs(tmp_path / "disk", f"size={size}") as disk:
            out = disk / "out"
            words = ("No space left on device", "free space", "the same command again: it resumes")
            refused(hf, out, StorageError, *words, target=target, litter=True)
            assert len(list(disk.iterdir())) == 1
            remount(disk, "size=8m")
            report = convert(hf, out, target=target)
            assert os.listdir(disk) == ["out"]
            convert(hf, disk / "calm", target=target)
            assert_same_bytes(report.path, disk / "calm" / report.path.relative_to(out))

    def test_out_of_inodes(self, hf: Path, tmp_path: Path) -> None:
        with tmpfs(tmp_path / "disk", "size=8m,nr_inodes=7") as disk:
            refused(hf, disk / "out", StorageError, "No space left on device", target=HF, litter=True)
            remount(disk, "nr_inodes=100")
            assert convert(hf, disk / "out", target=HF).path.is_dir()

    @pytest.mark.parametrize("target", [HF, TargetOptions(to="megatron")])
    def test_read_only(self, hf: Path, tmp_path: Path, target: TargetOptions) -> None:
        with tmpfs(tmp_path / "disk", "size=8m") as disk:
            remount(disk, "ro")
            words = ("Read-only file system", "writable filesystem")
            refused(hf, disk / "out", StorageError, *words, target=target)

    def test_mount_point_is_no_destination_of_an_hf_checkpoint(self, hf: Path, tmp_path: Path) -> None:
        with tmpfs(tmp_path / "disk", "size=8m") as disk:
            refused(hf, disk, StorageError, "is a mount point", target=HF)
            assert convert(hf, disk).path == disk / "release"

    def test_source_on_a_read_only_filesystem(self, tmp_path: Path, out: Path) -> None:
        with tmpfs(tmp_path / "disk", "size=8m") as disk:
            hf = plain("qwen3").write(disk / "hf")
            remount(disk, "ro")
            assert convert(hf, out).path.is_dir()

    def test_below_a_file(self, hf: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        refused(hf, tmp_path / "file" / "out", StorageError, "Not a directory", target=HF)

    def test_name_that_is_too_long(self, hf: Path, tmp_path: Path) -> None:
        refused(hf, tmp_path / ("a" * 300), StorageError, "File name too long", target=HF)
        refused(hf, tmp_path / "new" / ("a" * 250), StorageError, "File name too long", target=HF)
        assert not (tmp_path / "new").exists()

    def test_no_permission(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            hf = plain("qwen3").write(Path(folder) / "hf")
            (Path(folder) / "closed").mkdir(mode=0o555)
            with without_privileges():
                refused(hf, Path(folder) / "closed" / "out", StorageError, "Permission denied", target=HF)


class TestNothingToResume:
    """A run that fails before it wrote anything leaves nothing; one that was stopped, its journal."""

    @pytest.mark.parametrize(
        ("target", "word"),
        [
            (TargetOptions(to="onnx"), "unknown layout"),
            (TargetOptions(dialect="mcore-0.17"), "unknown dialect"),
            (TargetOptions(layer_keys="both"), "stacked or per-layer"),
            (TargetOptions(to="hf", layer_keys="stacked"), "are for --to megatron"),
            (TargetOptions(to="hf", iteration=3), "are for --to megatron"),
            (TargetOptions(to="megatron", max_shard_size=5), "is for --to hf"),
            (TargetOptions(to="hf", max_shard_size=0), "must be positive"),
            (TargetOptions(to="megatron", iteration=-3), "--iteration -3"),
            (TargetOptions(to="megatron", iteration=10**18), "--iteration"),
            (TargetOptions(to="megatron", padded_vocab=5), "below the vocabulary's 384"),
            (TargetOptions(to="megatron", dtype="int8"), "--dtype int8"),
            (STACKED, "has no experts to stack"),
        ],
    )
    def test_options_that_mean_nothing(self, hf: Path, out: Path, target: TargetOptions, word: str) -> None:
        refused(hf, out, UsageError, word, target=target)

    def test_no_workers(self, hf: Path, out: Path) -> None:
        refused(hf, out / "deep" / "er", UsageError, "0 workers", run=RunOptions(workers=0))

    def test_directories_above_it_are_not_left(self, tmp_path: Path) -> None:
        hf = plain("glm-4.5", copies=True)
        hf.add("model.layers.4.embed_tokens.weight", (384, 64))
        src = hf.write(tmp_path / "hf")
        refused(src, tmp_path / "new" / "er" / "out", DataError, "should be equal")
        assert not (tmp_path / "new").exists()

    def test_dry_run_writes_nothing(self, hf: Path, tmp_path: Path) -> None:
        before = snapshot(tmp_path)
        report = convert(hf, tmp_path / "new" / "out", run=RunOptions(dry_run=True))
        assert report.ledger.used_bytes > 0
        assert snapshot(tmp_path) == before


class TestPathsOfAPlan:
    """Whatever names a source has, the plan writes each file once and inside of the unit."""

    @pytest.mark.parametrize(
        ("paths", "word"),
        [
            (("a", "b/c"), ""),
            (("a", "a"), "is written 2 times"),
            (("a", "./a"), "is written 2 times"),
            (("a", "a/b"), "lies inside of another target file"),
            (("../a",), "is not a path inside the unit"),
            (("/a",), "is not a path inside the unit"),
            (("",), "is not a path inside the unit"),
        ],
    )
    def test_they_are_proved(self, paths: tuple[str, ...], word: str) -> None:
        plan = Plan([], [literal_file(path, b"x") for path in paths])
        if not word:
            assert prove(plan, {}, 0, set()).target_bytes == len(paths)
            return
        with pytest.raises(DataError, match=word):
            prove(plan, {}, 0, set())


def stopped(hf: Path, out: Path, target: TargetOptions = HF, number: int = 15) -> str:
    """Convert and stop early, as a signal does."""
    stop = Stop()
    stop.request(number)
    with pytest.raises(Interrupted) as caught:
        convert(hf, out, target=target, stop=stop)
    assert caught.value.exit_code == 128 + number
    assert not out.exists()
    return str(caught.value)


class TestUnfinished:
    """What a stopped run left is taken over by the same command and by no other."""

    def test_same_command_resumes(self, hf: Path, out: Path) -> None:
        assert "run the same command again: it resumes" in stopped(hf, out)
        assert convert(hf, out, target=HF).path == out
        assert sorted(os.listdir(out.parent)) == ["hf", "out"]

    @pytest.mark.parametrize("number", [2, 15])
    def test_exit_code_tells_the_signal(self, hf: Path, out: Path, number: int) -> None:
        stopped(hf, out, number=number)

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            (lambda hf: os.utime(shards_of(hf)[0]), "modification time"),
            (lambda hf: (hf / "LICENSE").write_text("longer than before"), "size"),
        ],
    )
    def test_changed_source_refuses(
        self, hf: Path, out: Path, change: Callable[[Path], object], word: str
    ) -> None:
        stopped(hf, out)
        change(hf)
        words = ("the source changed since the unfinished run", word, "--overwrite")
        refused(hf, out, DataError, *words, target=HF)
        assert convert(hf, out, target=HF, run=AGAIN).path == out

    def test_a_time_that_was_set_back_hides_no_change(self, hf: Path, out: Path) -> None:
        status = (hf / "LICENSE").stat()
        stopped(hf, out)
        os.utime(hf / "LICENSE")
        refused(hf, out, DataError, "the source changed since the unfinished run", target=HF)
        os.utime(hf / "LICENSE", ns=(status.st_atime_ns, status.st_mtime_ns))
        refused(hf, out, DataError, "the time of change of", "LICENSE", "--overwrite", target=HF)

    def test_other_plan_refuses(self, hf: Path, out: Path) -> None:
        stopped(hf, out)
        other = TargetOptions(to="hf", max_shard_size=100_000)
        refused(
            hf,
            out,
            StorageError,
            "the unfinished run here was asked for otherwise: --max-shard-size (left out) there, 100000 here",
            "--overwrite",
            target=other,
        )
        assert convert(hf, out, target=other, run=AGAIN).path == out

    def test_other_hash_mode_refuses(self, hf: Path, out: Path) -> None:
        stopped(hf, out)
        run = RunOptions(hash_mode="none")
        refused(hf, out, StorageError, "was started with --hash full", target=HF, run=run)

    def test_file_that_the_unfinished_run_wrote_is_cut(self, hf: Path, out: Path, tmp_path: Path) -> None:
        """Between the two runs somebody tidied up the hidden directory."""
        unit = out.parent / ".out.glmconv-hf.partial" / "unit"

        def full(progress: Progress) -> None:
            raise StorageError("the disk is gone")

        with pytest.raises(StorageError, match="the disk is gone"):
            convert(hf, out, target=HF, progress=full)
        os.truncate(unit / shards_of(hf)[0].name, 10)
        convert(hf, out, target=HF)
        convert(hf, tmp_path / "calm", target=HF)
        assert_same_bytes(out, tmp_path / "calm")

    def test_journal_with_a_torn_tail(self, hf: Path, out: Path, tmp_path: Path) -> None:
        def full(progress: Progress) -> None:
            raise StorageError("the disk is gone")

        with pytest.raises(StorageError, match="the disk is gone"):
            convert(hf, out, target=HF, progress=full)
        journal = out.parent / ".out.glmconv-hf.partial" / "journal"
        os.truncate(journal, journal.stat().st_size - 5)
        report: Report = convert(hf, out, target=HF)
        assert report.outcome is not None
        convert(hf, tmp_path / "calm", target=HF)
        assert_same_bytes(out, tmp_path / "calm")


@pytest.mark.parametrize("run", [RunOptions(), AGAIN])
def test_a_unit_that_is_a_link_is_never_replaced(tmp_path: Path, run: RunOptions) -> None:
    hf, out = plain("qwen3").write(tmp_path / "hf"), tmp_path / "out"
    kept = convert(hf, tmp_path / "elsewhere").path
    before = snapshot(kept)
    out.mkdir()
    (out / "release").symlink_to(kept)
    refused(hf, out, StorageError, "is a link", str(kept), run=run, target=None, litter=True, meddled=False)
    assert (out / "release").is_symlink()
    assert snapshot(kept) == before


class Killed(BaseException):
    """Ends a run where it stands; nothing that handles errors sees it."""


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("damage", ["unit gone", "manifest gone"])
def test_the_replaced_unit_is_never_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, damage: str
) -> None:
    """Killed right after the exchange; then the new unit is taken away: what is staged is the old one."""
    made = plain("qwen3")
    old = made.write(tmp_path / "a")
    made.add("model.norm.weight", made.tensors["model.norm.weight"].shape)
    new = made.write(tmp_path / "b")
    target, out = TargetOptions(to=to), tmp_path / "out"
    unit = convert(old, out, target=target).path
    exchange = sys.modules["glmconv.engine.publishing"]._exchange

    def killed(left: Path, right: Path) -> None:
        exchange(left, right)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["glmconv.engine.publishing"], "_exchange", killed)
        with pytest.raises(Killed):
            convert(new, out, target=target, run=AGAIN)
    if damage == "unit gone":
        shutil.rmtree(unit)
    else:
        (unit / "glmconv.json").unlink()
    convert(new, out, target=target, run=AGAIN)
    assert diff(new, out).equal
    assert not diff(old, out).equal


def test_a_run_killed_between_rename_and_tracker_is_finished_by_the_same_command(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    hf, dst = checkpoint("qwen3"), tmp_path / "out"
    convert(hf, dst, target=TargetOptions(to="megatron"))
    tracker = dst / "latest_checkpointed_iteration.txt"
    before = (dst / "release" / "glmconv.json").read_bytes()
    tracker.unlink()
    with pytest.raises(StorageError, match="exists already"):
        convert(hf, dst, target=TargetOptions(to="megatron", dialect="slime", layer_keys="per-layer"))
    report = convert(hf, dst, target=TargetOptions(to="megatron"))
    assert report.finished_earlier
    assert tracker.read_text() == "release"
    assert (dst / "release" / "glmconv.json").read_bytes() == before
