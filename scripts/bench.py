"""Measure conversions against `cp` and against what peers do, in one run.

Every way is a whole process, timed to the end of a `sync`, page cache hot, all ways alternating;
medians count. Memory is the anonymous memory (RssAnon) of the process tree, sampled. Example:
``python scripts/bench.py --dir /scratch --gigabytes 4 --rounds 5``.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

SAMPLE = 0.05
"""Seconds between two looks at the memory of a running process tree."""

SAFETENSORS = """
import sys, glob, os
from safetensors.torch import load_file, save_file
src, dst = sys.argv[1:]
os.makedirs(dst)
for path in sorted(glob.glob(src + "/*.safetensors")):
    save_file(load_file(path), os.path.join(dst, os.path.basename(path)), {"format": "pt"})
"""

DCP = """
import sys, glob, os
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
src, dst = sys.argv[1:]
state = {}
for path in sorted(glob.glob(src + "/*.safetensors")):
    state.update(load_file(path))
dcp.save(state, storage_writer=dcp.FileSystemWriter(dst), no_dist=True)
"""


def tree_rss_anon(root: int) -> int:
    """RssAnon of a process and all its descendants, in bytes."""
    children: dict[int, list[int]] = {}
    memory: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        children.setdefault(int(fields["PPid"]), []).append(int(entry))
        memory[int(entry)] = int(fields.get("RssAnon", "0 kB").split()[0]) * 1024
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += memory.get(pid, 0)
        waiting += children.get(pid, [])
    return total


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds to the end of a `sync`, and the peak RssAnon of the tree in bytes."""
    os.sync()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_rss_anon(process.pid))
        time.sleep(SAMPLE)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    os.sync()
    return time.monotonic() - began, peak


def measure(
    ways: dict[str, Callable[[Path], list[str]]], work: Path, rounds: int
) -> dict[str, list[tuple[float, int]]]:
    """Run every way once a round, in turn, each into an empty place."""
    results: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(rounds):
        order = list(ways.items())
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            target = work / "out"
            results[name].append(timed(way(target)))
            shutil.rmtree(target)
            seconds, peak = results[name][-1]
            print(f"round {number + 1} {name}: {seconds:.2f} s, {peak / 2**20:.0f} MiB", file=sys.stderr)
    return results


def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where to work; needs 4 times the size.")] = Path(
        "bench"
    ),
    gigabytes: Annotated[float, typer.Option(help="Size of the checkpoint, in GB.")] = 4.2,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.")] = 5,
    workers: Annotated[int, typer.Option("-j", help="Threads of glmconv.")] = 2,
    peers: Annotated[bool, typer.Option(help="Also time safetensors and torch DCP.")] = True,
    copy_mode: Annotated[str, typer.Option(help="glmconv's --copy-mode.")] = "copy",
) -> None:
    """Make a checkpoint in a big model's proportions and time every way to move it."""
    sys.path.insert(0, str(Path(__file__).parent))
    from make_checkpoint import make_proportioned

    work = directory.resolve() / "glmconv-bench"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    hf, megatron = work / "hf", work / "megatron"
    make_proportioned(hf, gigabytes)
    glmconv = [
        sys.executable,
        "-m",
        "glmconv",
        "convert",
        "--quiet",
        "-j",
        str(workers),
        "--copy-mode",
        copy_mode,
    ]
    subprocess.run(
        [*glmconv, str(hf), str(megatron), "--to", "megatron"], check=True, stdout=subprocess.DEVNULL
    )
    ways: dict[str, Callable[[Path], list[str]]] = {
        "cp hf": lambda out: ["cp", "-r", "--reflink=never", str(hf), str(out)],
        "glmconv hf to megatron": lambda out: [*glmconv, str(hf), str(out), "--to", "megatron"],
        "cp megatron": lambda out: ["cp", "-r", "--reflink=never", str(megatron), str(out)],
        "glmconv megatron to hf": lambda out: [*glmconv, str(megatron), str(out), "--to", "hf"],
    }
    if peers:
        ways["safetensors load and save"] = lambda out: [sys.executable, "-c", SAFETENSORS, str(hf), str(out)]
        ways["torch dcp.save"] = lambda out: [sys.executable, "-c", DCP, str(hf), str(out)]
    for path in [*hf.rglob("*"), *megatron.rglob("*")]:
        if path.is_file():
            subprocess.run(["cat", str(path)], check=True, stdout=subprocess.DEVNULL)
    results = measure(ways, work, rounds)
    size = sum(path.stat().st_size for path in hf.rglob("*") if path.is_file())
    shutil.rmtree(work)
    report(results, size, workers)


def report(results: dict[str, list[tuple[float, int]]], size: int, workers: int) -> None:
    """Medians as a Markdown table and as one line of JSON."""
    medians = {name: statistics.median(s for s, _ in runs) for name, runs in results.items()}
    cores = os.cpu_count()
    print(f"{size / 1e9:.2f} GB, {workers} workers, Python {platform.python_version()}, {cores} cores\n")
    print("| way | median s | of cp | slowest s | peak RssAnon MiB |\n|---|---|---|---|---|")
    for name, runs in results.items():
        base = medians["cp megatron" if "megatron to hf" in name or name == "cp megatron" else "cp hf"]
        peak = max(p for _, p in runs) / 2**20
        print(
            f"| {name} | {medians[name]:.2f} | {medians[name] / base:.2f} "
            f"| {max(s for s, _ in runs):.2f} | {peak:.0f} |"
        )
    print("\n" + json.dumps(dict(results)))


if __name__ == "__main__":
    typer.run(main)
