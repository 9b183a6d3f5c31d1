"""Names from files reach the terminal as text: no escape sequence, no markup, no forged line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glmconv.basics.errors import DataError, Defect
from glmconv.basics.printable import shown, shown_json
from glmconv.commands.convert import convert
from tests.support.plain import edit_json, plain

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e[red]bold[/red]\rgone\x7f"
RAW = "\x1b\x07\x9b\u202e\x7f\x85\u2028"


def glmconv(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glmconv", *map(str, words)]
    environment = {**os.environ, "FORCE_COLOR": "", "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def assert_harmless(text: str) -> None:
    assert [character for character in text if character in RAW or character == "\r"] == []


def test_text() -> None:
    assert shown("a\x1b[31m\x9b\u202e\nb\udce9") == "a\\x1b[31m\\x9b\\u202e\\x0ab\\udce9"
    assert shown("a\nb\x1b", lines=True) == "a\nb\\x1b"
    assert shown("Größe [red] 层 é") == "Größe [red] 层 é"


@pytest.mark.parametrize("indent", [None, 1])
def test_json_stays_the_same_document(indent: int | None) -> None:
    value = {EVIL: [EVIL, "\u2028\ufeff", "\n"]}
    text = shown_json(json.dumps(value, ensure_ascii=False, indent=indent))
    assert_harmless(text)
    assert json.loads(text) == value


def test_errors() -> None:
    defects = [Defect("kind", f"what {EVIL}", f"where\n{EVIL}", f"hint {EVIL}")]
    message = str(DataError(f"what {EVIL}", where=EVIL, hint=EVIL, defects=defects))
    assert_harmless(message)
    assert len(message.splitlines()) == 3
    assert "\\x1b[2J" in message
    assert "[red]bold[/red]" in message


class TestCommands:
    def evil(self, tmp_path: Path) -> Path:
        """A sound checkpoint at a path, and with side files, of evil names."""
        made = plain("qwen3")
        hf = made.write(tmp_path / f"hf{EVIL.replace('/', '-')}")
        (hf / f"README{EVIL.replace('/', '-')}.md").write_text("text")
        (hf / f"odd{EVIL.replace('/', '-')}.xyz").write_text("text")
        return hf

    @pytest.mark.slow
    def test_sound(self, tmp_path: Path) -> None:
        hf = self.evil(tmp_path)
        out = tmp_path / "out"
        for words in (
            ("convert", hf, out),
            ("inspect", hf),
            ("check", hf, "--values"),
            ("diff", hf, out),
            ("inspect", out),
        ):
            done = glmconv(*words)
            assert done.returncode == 0, done.stderr
            assert_harmless(done.stdout + done.stderr)
            assert "out" in words[-1:] or "[red]bold[-red]" in done.stdout + done.stderr
        done = glmconv("convert", hf, tmp_path / "second", "--json")
        assert_harmless(done.stdout)
        assert json.loads(done.stdout)["source"] == str(hf)

    @pytest.mark.slow
    def test_unsound(self, tmp_path: Path) -> None:
        sound = plain("qwen3").write(tmp_path / "sound")
        made = plain("qwen3")
        made.add(f"model.{EVIL}.weight", (2, 2))
        hf = made.write(tmp_path / "hf")
        for words in (
            ("convert", hf, tmp_path / "out"),
            ("check", hf),
            ("inspect", hf, "--tensors"),
            ("diff", hf, sound),
        ):
            done = glmconv(*words)
            assert_harmless(done.stdout + done.stderr)
            assert "Traceback" not in done.stderr
            assert "[red]bold" in done.stdout + done.stderr

    @pytest.mark.slow
    def test_words_of_a_config(self, tmp_path: Path) -> None:
        hf = plain("qwen3").write(tmp_path / "hf")
        convert(hf, tmp_path / "root")
        for file in (hf / "config.json", tmp_path / "root" / "release" / "hf" / "config.json"):
            edit_json(file, lambda config: config.update(model_type=f"a{EVIL}"))
            done = glmconv("convert", file.parent if file.parent == hf else tmp_path / "root", tmp_path / "x")
            assert done.returncode == 1
            assert_harmless(done.stderr)
            assert "\\x1b" in done.stderr
