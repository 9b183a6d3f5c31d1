"""An option never beats what a conversion left on record, and never means nothing in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.errors import DataError, UsageError
from glmconv.checks.findings import CheckOptions
from glmconv.commands.check import check
from glmconv.commands.convert import convert, plan_conversion
from glmconv.commands.diff import DiffOptions, diff
from glmconv.commands.inspect import inspect
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from glmconv.tables.rules import DIALECTS
from tests.support.plain import edit_json, plain, refused
from tests.support.trained import trained


@pytest.fixture(params=["glm-5.2", "qwen3"])
def hf(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return plain(request.param).write(tmp_path / "hf")


class TestDialect:
    @pytest.mark.parametrize("written", DIALECTS)
    @pytest.mark.parametrize("said", DIALECTS)
    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_that_contradicts_the_manifest(self, tmp_path: Path, written: str, said: str, to: str) -> None:
        hf = plain("glm-5.2").write(tmp_path / "hf")
        root, out = tmp_path / "root", tmp_path / "out"
        convert(hf, root, target=TargetOptions(to="megatron", dialect=written))
        source, target = SourceOptions(dialect=said), TargetOptions(to=to)
        if said == written:
            assert convert(root, out, source=source, target=target).path.is_dir()
            return
        words = (f"said to be {said}", f"was written as {written}", "leave the option away")
        refused(root, out, UsageError, *words, source=source, target=target)

    def test_of_other_verbs(self, hf: Path, tmp_path: Path) -> None:
        convert(hf, tmp_path / "root", target=TargetOptions(to="megatron", dialect="slime"))
        options = SourceOptions(dialect="miles")
        with pytest.raises(UsageError, match="written as slime"):
            check(tmp_path / "root", CheckOptions(source=options))
        with pytest.raises(UsageError, match="written as slime"):
            diff(hf, tmp_path / "root", DiffOptions(b=options))

    def test_without_a_manifest_is_believed(self, hf: Path, tmp_path: Path) -> None:
        trained(hf, tmp_path / "root", dialect="slime")
        source = SourceOptions(dialect="slime", origin_hf_dir=hf)
        assert plan_conversion(tmp_path / "root", source).source.layout == "slime"

    @pytest.mark.parametrize("name", ["no-such-dialect", "", "MCORE"])
    def test_unknown(self, hf: Path, tmp_path: Path, name: str) -> None:
        convert(hf, tmp_path / "root")
        for src in (hf, tmp_path / "root"):
            words = ("unknown dialect", *DIALECTS)
            refused(src, tmp_path / "out", UsageError, *words, source=SourceOptions(dialect=name))

    @pytest.mark.parametrize("to", ["hf", "megatron"])
    def test_of_a_hugging_face_source(self, hf: Path, tmp_path: Path, to: str) -> None:
        words = ("dialect mcore", "Hugging Face checkpoint", "leave the option away")
        source, target = SourceOptions(dialect="mcore"), TargetOptions(to=to)
        refused(hf, tmp_path / "out", UsageError, *words, source=source, target=target)

    def test_of_an_export(self, hf: Path, tmp_path: Path) -> None:
        convert(hf, tmp_path / "root")
        target = TargetOptions(dialect="mcore")
        refused(tmp_path / "root", tmp_path / "out", UsageError, "hf has no dialects", target=target)


def glmconv(*words: object) -> tuple[int, str]:
    """Exit code and stderr of the command."""
    import os
    import subprocess
    import sys

    command = [sys.executable, "-m", "glmconv", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    return done.returncode, done.stderr


class TestCommand:
    """On an export ``--dialect`` is the source's, whether or not ``--to hf`` stands there."""

    @pytest.mark.slow
    @pytest.mark.parametrize("to", [(), ("--to", "hf"), ("--saver", "hf")])
    def test_export(self, tmp_path: Path, to: tuple[str, ...]) -> None:
        hf, root, out = plain("glm-5.2").write(tmp_path / "hf"), tmp_path / "root", tmp_path / "out"
        convert(hf, root, target=TargetOptions(to="megatron", dialect="slime"))
        code, told = glmconv("convert", root, out, *to, "--dialect", "miles", "-q")
        assert (code, out.exists()) == (2, False)
        assert "miles" in told
        assert "slime" in told
        code, told = glmconv("convert", root, out, *to, "--dialect", "slime", "-q")
        assert (code, told) == (0, "")

    @pytest.mark.slow
    def test_two_words_for_the_target(self, hf: Path, tmp_path: Path) -> None:
        code, told = glmconv("convert", hf, tmp_path / "out", "--to", "megatron", "--saver", "hf")
        assert (code, "--saver hf" in told) == (2, True)


class TestConfig:
    @pytest.mark.parametrize("place", ["root", "unit"])
    @pytest.mark.parametrize("by", ["root", "unit"])
    def test_beside_the_tensors(self, hf: Path, tmp_path: Path, place: str, by: str) -> None:
        """Config and tokenizer in the directory of a run, or of one iteration of it."""
        root, out = tmp_path / "run", tmp_path / "out"
        unit = trained(hf, root, iteration=50)
        shutil.copytree(unit, root / "iter_0000040")
        (unit / "run_config.yaml").write_text("a: 1\n")
        folder = root if place == "root" else unit
        for name in ("config.json", "tokenizer.json", "LICENSE"):
            shutil.copy(hf / name, folder / name)
        report = convert(root if by == "root" else unit, out)
        assert report.config == folder / "config.json"
        assert json.loads((out / "glmconv.json").read_text())["config"] == str(folder / "config.json")
        written = {str(path.relative_to(out)) for path in out.rglob("*")}
        sides = {name for name in written if not name.startswith("model")}
        assert sides == {"config.json", "tokenizer.json", "LICENSE", "glmconv.json"}
        assert inspect(out).understood
        assert check(out, CheckOptions()).ok
        assert diff(out, hf, DiffOptions()).equal
        named = convert(root, tmp_path / "again", source=SourceOptions(origin_hf_dir=folder))
        assert {path.name for path in named.path.iterdir()} == {path.name for path in out.iterdir()}

    def test_that_moves_what_the_manifests_config_placed(self, tmp_path: Path) -> None:
        """Other heads with equal shapes: the rows of q, k and v would be scrambled."""
        hf = plain("qwen3").write(tmp_path / "hf")
        root, out = tmp_path / "root", tmp_path / "out"
        convert(hf, root)
        config = hf / "config.json"
        before = json.loads(config.read_text())
        heads, groups = before["num_attention_heads"], before["num_key_value_heads"]
        edit_json(
            config,
            lambda c: c.update(
                num_attention_heads=2 * heads, num_key_value_heads=2 * groups, head_dim=c["head_dim"] // 2
            ),
        )
        source = SourceOptions(origin_hf_dir=hf)
        words = (f"num_heads: {heads} and {2 * heads}", "leave --origin-hf-dir away")
        refused(root, out, DataError, *words, source=source)
        edit_json(config, lambda c: c.update(before | {"rms_norm_eps": 0.5}))
        (warning,) = [one for one in convert(root, out, source=source).warnings if one.kind == "config"]
        assert "norm_eps" in warning.what


class TestHugeFiles:
    """JSON is read in bounded memory: a sparse file of 6 GB takes no space and no time."""

    def grow(self, file: Path, size: int = 6 << 30) -> None:
        with file.open("r+b") as stream:
            stream.truncate(size)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
    def test_of_a_source(self, hf: Path, tmp_path: Path, name: str) -> None:
        self.grow(hf / name)
        refused(hf, tmp_path / "out", DataError, name, "6,442,450,944 bytes long", "has at most")

    @pytest.mark.parametrize("name", ["config.json", "glmconv-origin.json"])
    def test_of_a_torch_dist(self, hf: Path, tmp_path: Path, name: str) -> None:
        convert(hf, tmp_path / "root")
        self.grow(tmp_path / "root" / "release" / "hf" / name)
        refused(tmp_path / "root", tmp_path / "out", DataError, name, "bytes long")

    def test_of_a_fill_source(self, hf: Path, tmp_path: Path) -> None:
        made: Any = plain("qwen3")
        del made.tensors["model.norm.weight"]
        made.write(tmp_path / "lacking")
        self.grow(hf / "config.json")
        refused(
            tmp_path / "lacking",
            tmp_path / "out",
            DataError,
            "config.json",
            "bytes long",
            source=SourceOptions(fill_missing_from=hf),
        )
