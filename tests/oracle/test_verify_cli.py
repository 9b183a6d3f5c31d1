"""``glmconv verify`` as a user meets it: tables, JSON, the page, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import mcore_run, verify_jobs
from tests.support.conversions import to_megatron
from tests.support.mutants import MUTANTS, planted

Make = Callable[..., Path]
LANE = "0.16.1"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> dict[str, Any]:
    """Each call's exit code and output, and where the page is; all calls run in one process."""
    folder = tmp_path_factory.mktemp("verify-cli")
    glm, moe = checkpoint("glm-5"), checkpoint("qwen3-moe")
    right, stacked = folder / "glm", folder / "moe"
    to_megatron(glm, right, "mcore-0.18")
    to_megatron(moe, stacked, "mcore-0.18")
    wrong = folder / "wrong"
    with planted(next(one for one in MUTANTS if one.name == "experts shifted by one")):
        to_megatron(moe, wrong, "mcore-0.18")
    shared = folder / "shared"
    to_megatron(checkpoint("glm-5.2"), shared)
    page, ids = folder / "page.html", folder / "ids.json"
    ids.write_text(json.dumps(list(range(5, 37))))
    sides = [str(glm), str(right)]
    calls = {
        "tables": [*sides, "--seq-len", "24", "--report", str(page)],
        "json": [*sides, "--tokens", str(ids), "--json"],
        "prompt": [*sides, "--prompt", "the quick brown fox jumps over the lazy dog " * 3],
        "dense": [*sides, "--seq-len", "8"],
        "wrong": [str(moe), str(wrong), "--seq-len", "24"],
        "self-test": [str(moe), str(stacked), "--seq-len", "24", "--self-test"],
        "self-test of a wrong one": [str(moe), str(wrong), "--seq-len", "24", "--self-test"],
        "swapped arguments": [str(right), str(glm)],
        "another model": [str(moe), str(right)],
        "no room": [*sides, "--seq-len", "24", "--max-memory", "1KB"],
        "little room": [str(moe), str(stacked), "--seq-len", "512", "--random", "4", "--max-memory", "500KB"],
        "no gpu": [*sides, "--device", "cuda"],
        "too old": [str(checkpoint("glm-5.2")), str(shared)],
    }
    arguments = {"calls": [["verify", *call] for call in calls.values()]}
    found = mcore_run.run(verify_jobs.command_line, lane=LANE, arguments=arguments)[0]
    return {**dict(zip(calls, found, strict=True)), "page": page}


def test_the_verdict_stands_last_and_everything_is_said(results: dict[str, Any]) -> None:
    found = results["tables"]
    assert found["exit"] == 0, found["err"]
    lines = found["out"].splitlines()
    assert lines[-1] == "verified: both models compute the same"
    for said in (
        "layer 3 MoE indexer",
        "mtp 0",
        "MTP 0 logprobs",
        "aligned: ",
        "megatron-core 0.16.1",
    ):
        assert said in found["out"]
    assert "by itself it selects other tokens" in found["out"].replace("\n", " ")
    assert "verified" in results["page"].read_text()


def test_json_is_the_whole_report(results: dict[str, Any]) -> None:
    found = results["json"]
    report = json.loads(found["out"])
    assert found["exit"] == report["exit_code"] == 0
    assert (report["verdict"], report["seq_len"], report["relaid"]) == ("verified", 32, False)
    assert set(report["versions"]) == {"glmconv", "python", "torch", "transformers", "megatron-core"}


def test_a_prompt_goes_through_the_tokenizer_of_the_hf_side(results: dict[str, Any]) -> None:
    assert results["prompt"]["exit"] in (0, 2), results["prompt"]["err"]


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("dense", 2, "never was sparse"),
        ("wrong", 4, "layer 0: relative error"),
        ("self-test of a wrong one", 4, "differ to begin with"),
        ("swapped arguments", 2, "wrong order"),
        ("another model", 1, "different models"),
        ("no room", 2, "is less than one layer"),
        ("little room", 3, "--max-memory allows"),
        ("no gpu", 2, "--device cpu"),
        ("too old", 2, "megatron-core>=0.19"),
    ],
)
def test_each_way_to_fail_has_its_exit_code_and_says_why(
    results: dict[str, Any], call: str, code: int, said: str
) -> None:
    found = results[call]
    assert found["exit"] == code, found
    assert said in found["out"] + found["err"]


def test_a_self_test_lists_every_fault(results: dict[str, Any]) -> None:
    found = results["self-test"]
    assert found["exit"] == 0, found["err"]
    assert "expert-order" in found["out"]
    assert "MISSED" not in found["out"]


def test_without_the_extra_verify_says_what_to_install_and_the_rest_works(
    tmp_path: Path, checkpoint: Make
) -> None:
    """A finder that hides megatron-core stands for its absence."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, sys\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('megatron', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(mcore_run.ROOT)])}
    hf, out = str(checkpoint("qwen3")), str(tmp_path / "out")

    def glmconv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "glmconv", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert glmconv("convert", hf, out).returncode == 0
    refused = glmconv("verify", hf, out)
    assert refused.returncode == 2
    assert "transformers and megatron-core" in refused.stderr
    assert "pip install 'glmconv[verify]'" in refused.stderr
