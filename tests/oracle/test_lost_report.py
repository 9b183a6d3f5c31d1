"""A report that cannot be written: the work stands, stderr says so, and the exit code is not one of data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT
from tests.support.conversions import to_megatron
from tests.support.plain import plain

FULL, READER_LEFT = 3, 141
Where = Callable[[], AbstractContextManager[int]]
VERBS = ("convert", "check", "diff", "inspect", "tables", "doctor")


@dataclass(frozen=True, slots=True)
class Places:
    hf: Path
    megatron: Path
    broken: Path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("lost-report")
    hf = plain("qwen3").write(folder / "hf")
    to_megatron(hf, folder / "megatron")
    broken = plain("qwen3").write(folder / "broken")
    next(iter(sorted(broken.glob("*.safetensors")))).unlink()
    return Places(hf, folder / "megatron", broken)


def arguments(verb: str, places: Places, out: Path) -> list[str]:
    given: dict[str, list[str | Path]] = {
        "convert": [places.hf, out, "--to", "megatron"],
        "check": [places.hf],
        "diff": [places.hf, places.megatron],
        "inspect": [places.hf, "--tensors"],
        "tables": ["glm_moe_dsa"],
        "doctor": [],
        "verify": [places.hf, places.megatron, "--seq-len", "8"],
    }
    return [verb, *map(str, given[verb])]


def as_json(verb: str) -> list[str]:
    return ["--format", "json"] if verb == "tables" else ["--json"]


@contextmanager
def full() -> Iterator[int]:
    """A device without room."""
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


@contextmanager
def unread() -> Iterator[int]:
    """A pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run(
    *words: str, stdout: int | None = subprocess.PIPE, stderr: int | None = subprocess.PIPE, shell: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glmconv", *words]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True, check=False)


@pytest.mark.parametrize("plain_data", [False, True], ids=["words", "json"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_device_is_an_error_of_output(
    places: Places, tmp_path: Path, verb: str, plain_data: bool
) -> None:
    with full() as fd:
        ended = run(
            *arguments(verb, places, tmp_path / "out"), *(as_json(verb) if plain_data else []), stdout=fd
        )
    assert ended.returncode == FULL
    assert ended.stderr.count("\n") == 2
    assert "could not be written to stdout: No space left on device" in ended.stderr
    if verb == "convert":
        assert f"the result is published at {tmp_path / 'out' / 'release'}; its report" in ended.stderr
        assert "try: glmconv inspect" in ended.stderr
        assert run("diff", str(places.hf), str(tmp_path / "out")).returncode == 0


@pytest.mark.parametrize("plain_data", [False, True], ids=["words", "json"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_left_is_no_failure(
    places: Places, tmp_path: Path, verb: str, plain_data: bool
) -> None:
    with unread() as fd:
        ended = run(
            *arguments(verb, places, tmp_path / "out"), *(as_json(verb) if plain_data else []), stdout=fd
        )
    assert ended.returncode == READER_LEFT
    if verb == "convert":
        assert f"the result is published at {tmp_path / 'out' / 'release'}; its report" in ended.stderr
        assert run("diff", str(places.hf), str(tmp_path / "out")).returncode == 0
    else:
        assert ended.stderr == ""


@pytest.mark.parametrize(("where", "code"), [(full, FULL), (unread, READER_LEFT)])
@pytest.mark.parametrize("plain_data", [False, True], ids=["words", "json"])
def test_verify_too(places: Places, tmp_path: Path, where: Where, code: int, plain_data: bool) -> None:
    with where() as fd:
        ended = run(*arguments("verify", places, tmp_path), *(["--json"] if plain_data else []), stdout=fd)
    assert ended.returncode == code, ended.stderr
    assert ("could not be written to stdout" in ended.stderr) == (code == FULL)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("convert", "--help")])
def test_help_and_version_too(words: tuple[str, ...]) -> None:
    with full() as fd:
        assert run(*words, stdout=fd).returncode == FULL
    with unread() as fd:
        assert run(*words, stdout=fd).returncode == READER_LEFT


@pytest.mark.parametrize("plain_data", [False, True], ids=["words", "json"])
def test_what_a_command_says_of_the_data_is_not_overturned(places: Places, plain_data: bool) -> None:
    """A check that found something says 1, whoever reads the rest."""
    words = ["check", str(places.broken), *(["--json"] if plain_data else [])]
    assert run(*words).returncode == 1
    for where in (full, unread):
        with where() as fd:
            assert run(*words, stdout=fd).returncode == 1


def test_closed_streams_end_the_same_way(places: Places, tmp_path: Path) -> None:
    """Nor may a file of the result get the number of a stream that the caller closed."""
    words = arguments("convert", places, tmp_path / "out")
    ended = run(*words, shell=">&-")
    assert ended.returncode == FULL
    assert "published at" in ended.stderr
    assert "Bad file descriptor" in ended.stderr
    for number, shell in enumerate(("<&- >&- 2>&-", "2>&-", ">/dev/full 2>&1", ">/dev/full 2>&-")):
        out = tmp_path / f"out-{number}"
        ended = run(*arguments("convert", places, out), shell=shell)
        assert ended.returncode == (0 if shell == "2>&-" else FULL)
        assert ended.stderr == ""
        assert run("diff", str(places.hf), str(out)).returncode == 0


def test_warnings_that_nobody_sees_do_not_end_the_work(tmp_path: Path) -> None:
    src = plain("qwen3").write(tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "a_key_of_tomorrow": 1}))
    words = ("convert", str(src), str(tmp_path / "out"), "--to", "megatron")
    assert "a_key_of_tomorrow" in run(*words).stderr
    for where in (full, unread):
        with where() as fd:
            ended = run(*words, "--overwrite", stderr=fd)
            wrong = run("check", str(tmp_path / "nothing"), stderr=fd)
        assert ended.returncode == 0
        assert "every byte" in ended.stdout
        assert wrong.returncode == 3


def test_a_long_report_may_be_cut_by_its_reader(places: Places) -> None:
    """What ``| head`` does: some of it is read, the rest has no reader."""
    command = [sys.executable, "-m", "glmconv", *arguments("inspect", places, places.hf)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode in (0, READER_LEFT)  # 0 where all of it was in the pipe already
    assert errors == b""
