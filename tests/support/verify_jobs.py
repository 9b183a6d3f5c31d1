"""What the tests of ``verify`` do inside the processes of ``mcore_run``: many verifications in one."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import glmconv.cli
from glmconv.basics.memory import rss_anon
from glmconv.source.open import open_source
from glmconv.verify import VerifyOptions, self_test, verify
from glmconv.verify.mcore.load import load_torch_dist, save_torch_dist
from glmconv.verify.mcore.model import build_model
from glmconv.verify.mcore.parallel import runtime
from glmconv.verify.page.html import page
from tests.support.mcore_train import optimizer_with_state

TOKENS: dict[str, Any] = {"random": 2, "seq_len": 48}
"""More tokens than any tiny model's indexer selects, so every selection is sparse."""


def verify_all(
    pairs: dict[str, list[str]], options: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The report of each (HF directory, torch_dist) as JSON; ``options`` by name, ``TOKENS`` otherwise."""
    torch.set_num_threads(1)
    found = {}
    for name, (hf, megatron) in pairs.items():
        asked = VerifyOptions(**((options or {}).get(name) or TOKENS))
        report = verify(Path(hf), Path(megatron), asked)
        found[name] = report.to_json() | {"page": page(report)}
    return found


def verify_saved(pairs: dict[str, list[str]], out: str) -> dict[str, Any]:
    """Load each torch_dist into the whole model, save it as megatron-core does, verify what was saved."""
    torch.set_num_threads(1)
    found = {}
    for name, (hf, megatron) in pairs.items():
        spec = open_source(Path(hf)).spec
        with runtime():
            model = build_model(spec)
            load_torch_dist(model, megatron)
            for form in ("plain", "singleton"):
                save_torch_dist(model, f"{out}/{name}/{form}", singleton_local_shards=form == "singleton")
            optimizer = optimizer_with_state(model, distributed=False)
            load_torch_dist(model, megatron)
            save_torch_dist(model, f"{out}/{name}/optimizer", optimizer=optimizer)
        for form in ("plain", "singleton", "optimizer"):
            report = verify(Path(hf), Path(out) / name / form, VerifyOptions(**TOKENS))
            found[f"{name} {form}"] = report.to_json()
    return found


def self_test_all(pairs: dict[str, list[str]]) -> dict[str, Any]:
    """The self-test's report of each pair as JSON."""
    torch.set_num_threads(1)
    return {
        name: self_test(Path(hf), Path(megatron), VerifyOptions(**TOKENS)).to_json()
        for name, (hf, megatron) in pairs.items()
    }


def command_line(calls: list[list[str]]) -> list[dict[str, Any]]:
    """Run ``glmconv`` with each list of arguments; exit code and what it wrote."""
    torch.set_num_threads(1)
    found = []
    for call in calls:
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.object(sys, "argv", ["glmconv", *call]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                glmconv.cli.main()
                code: Any = 0
            except SystemExit as stopped:
                code = stopped.code or 0
        found.append({"exit": code, "out": out.getvalue(), "err": err.getvalue()})
    return found


WATCHER = """
import os, sys, time
def rss(pid):
    try:
        lines = open(f"/proc/{pid}/status").read().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except OSError:
        return 0
def tree(pid):
    yield pid
    try:
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
    except OSError:
        children = []
    for child in children:
        if int(child) != os.getpid():
            yield from tree(child)
peak = 0
while not os.path.exists(sys.argv[2]):
    peak = max(peak, sum(rss(pid) for pid in tree(sys.argv[1])))
    open(sys.argv[3], "w").write(str(peak))
    time.sleep(0.005)
"""
"""Watches the anonymous memory of a process and its children, itself left out, from outside."""


def verify_within(warm: list[str], pair: list[str], limit: int, folder: str) -> dict[str, Any]:
    """Verify ``pair`` under ``limit`` bytes; the peak that another process saw, beyond what was there before.

    ``warm`` is a small pair that is verified first, so that everything is imported.
    """
    torch.set_num_threads(1)
    verify(Path(warm[0]), Path(warm[1]), VerifyOptions(seq_len=16))
    gc.collect()
    before = rss_anon()
    stop, seen = Path(folder) / "stop", Path(folder) / "seen"
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER, str(os.getpid()), str(stop), str(seen)])
    try:
        while not seen.exists():
            time.sleep(0.01)
        report = verify(Path(pair[0]), Path(pair[1]), VerifyOptions(seq_len=64, max_memory=limit))
    finally:
        stop.touch()
        watcher.wait()
    return report.to_json() | {"seen": int(seen.read_text()) - before}
