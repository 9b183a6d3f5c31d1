"""Feed thousands of broken checkpoints to glmconv: every one must end in success or a GlmconvError.

Tiny checkpoints of both kinds are made once; each input changes one file of one of them and is
given to ``convert``, ``check``, ``inspect`` or ``diff`` in this process, under a limit of time and of
memory. A refusal must leave nothing at the destination, and no run may touch its source. The same
seed gives the same inputs. Example: ``python scripts/fuzz.py --count 10000``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from checkpoint_configs import raw_config  # noqa: E402
from fuzz_inputs import (  # noqa: E402
    Mutator,
    any_bytes,
    json_text,
    odd_side_file,
    pickle_bytes,
    record_heads,
    safetensors_file,
    torch_archive,
)

from glmconv.basics.errors import GlmconvError  # noqa: E402
from glmconv.checks.findings import CheckOptions  # noqa: E402
from glmconv.commands.check import check  # noqa: E402
from glmconv.commands.convert import RunOptions, convert  # noqa: E402
from glmconv.commands.diff import diff  # noqa: E402
from glmconv.commands.inspect import inspect  # noqa: E402
from glmconv.plan.planner import TargetOptions  # noqa: E402
from glmconv.source.open import open_source  # noqa: E402
from tests.support.plain import plain_of  # noqa: E402

SECONDS = 10
"""A run that takes longer counts as a hang."""

MEMORY = 1536 << 20
"""Bytes of address space that all runs may take beyond what the process began with."""

HEADROOM = 20
"""Seconds after ``SECONDS`` in which a run may still be inside of one C function."""


class Hang(BaseException):
    """Raised by the timer; no handler of ``Exception`` may take it."""


@dataclass(frozen=True, slots=True)
class Base:
    """A sound checkpoint. ``to``: what it is converted to. ``twin``: another form of the same model."""

    path: Path
    to: str
    twin: Path


@dataclass(frozen=True, slots=True)
class Field:
    """Files (a glob below a base) that a mutator changes, and how often it is drawn."""

    name: str
    glob: str
    mutate: Mutator
    weight: int


FIELDS = (
    Field("safetensors header", "*.safetensors", safetensors_file, 24),
    Field("index", "model.safetensors.index.json", json_text, 8),
    Field("config", "**/config.json", json_text, 20),
    Field(".metadata", "**/.metadata", pickle_bytes, 16),
    Field("common.pt", "**/common.pt", torch_archive, 6),
    Field(".distcp", "**/*.distcp", record_heads, 12),
    Field("origin record", "**/glmconv-origin.json", json_text, 6),
    Field("manifest", "**/glmconv.json", json_text, 6),
    Field("tracker", "latest_checkpointed_iteration.txt", any_bytes, 1),
)
SIDE_FILE = Field("side file", "", any_bytes, 4)


@dataclass(slots=True)
class Tally:
    """What the runs ended in. ``bugs`` are texts that say how to see one again."""

    ended: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)
    slowest: float = 0.0
    seconds: float = 0.0


def tiny_configs() -> dict[str, dict[str, Any]]:
    """Models of some kilobytes: one dense, one with all that a family can have."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 16}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    layers = ["dense", "sparse", "sparse"]
    latent = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2}
    latent |= {"qk_head_dim": 8, "v_head_dim": 5, "index_head_dim": 4, "index_n_heads": 2}
    moe = {
        "n_routed_experts": 3,
        "moe_intermediate_size": 7,
        "num_hidden_layers": 3,
        "mlp_layer_types": layers,
    }
    shared = {"indexer_types": ["full", "full", "shared"], "index_skip_topk_offset": 2, "index_topk_freq": 2}
    return {
        "qwen3": raw_config("qwen3") | sizes | attention | {"num_hidden_layers": 2},
        "glm": raw_config("glm-5.2") | sizes | latent | moe | shared | {"first_k_dense_replace": 1},
    }


def make_bases(work: Path) -> list[Base]:
    """The checkpoints that inputs are made of, in ``work``."""
    bases = []
    for name, config in tiny_configs().items():
        hf = plain_of(config).write(work / f"{name}-hf")
        megatron, written = work / f"{name}-megatron", work / f"{name}-written"
        convert(hf, megatron, target=TargetOptions(to="megatron"))
        convert(megatron, written, target=TargetOptions(to="hf"))
        bases += [Base(hf, "megatron", written), Base(megatron, "hf", hf), Base(written, "hf", megatron)]
        if name == "glm":
            stacked = plain_of(config, stacked=True).write(work / f"{name}-stacked")
            slime = work / f"{name}-slime"
            convert(stacked, slime, target=TargetOptions(to="megatron", dialect="slime"))
            bases += [Base(stacked, "megatron", slime), Base(slime, "megatron", stacked)]
    return bases


@contextmanager
def mutated(base: Base, chosen: Field, rng: random.Random) -> Iterator[Path]:
    """The base with one file changed while the block runs; yields that file."""
    if chosen is SIDE_FILE:
        added = odd_side_file(rng, rng.choice([base.path, *base.path.glob("*/hf")]))
        try:
            yield added
        finally:
            shutil.rmtree(added) if added.is_dir() and not added.is_symlink() else added.unlink()
        return
    file = rng.choice(sorted(base.path.glob(chosen.glob)))
    before = file.read_bytes()
    file.write_bytes(chosen.mutate(rng, before))
    try:
        yield file
    finally:
        file.write_bytes(before)


def draw(bases: list[Base], rng: random.Random) -> tuple[Base, Field]:
    """A base and something in it to change."""
    fields = [*FIELDS, SIDE_FILE]
    while True:
        base = rng.choice(bases)
        chosen = rng.choices(fields, [one.weight for one in fields])[0]
        if chosen is SIDE_FILE or any(base.path.glob(chosen.glob)):
            return base, chosen


def actions(base: Base, out: Path, rng: random.Random) -> tuple[str, Callable[[], Any]]:
    """One of the things that a user may do with the input."""
    target = TargetOptions(to=base.to, dialect=rng.choice(("mcore", "mcore-0.18", "slime", "miles")))
    if base.to == "megatron" and rng.random() < 0.1:
        target = TargetOptions(to="megatron", dtype="float32", padded_vocab=24)
    run = RunOptions(workers=1)
    hashes = any(base.path.glob("**/glmconv.json")) or rng.random() < 0.1
    checks = CheckOptions(values=True, hashes=hashes, indexer=True, workers=1)
    return rng.choices(
        [
            ("convert", lambda: _convert(base.path, out, target, run)),
            ("check", lambda: check(base.path, checks)),
            ("inspect", lambda: json.dumps(inspect(base.path).to_json(), default=str)),
            ("diff", lambda: diff(base.path, base.twin)),
        ],
        [60, 20, 12, 8],
    )[0]


def _convert(src: Path, out: Path, target: TargetOptions, run: RunOptions) -> None:
    """Convert; what comes out must be sound, whatever went in."""
    path = convert(src, out, target=target, run=run).path
    try:
        open_source(path).require_sound()
    except GlmconvError as error:
        raise RuntimeError(f"an unsound checkpoint was published: {error}") from error


def one(number: int, seed: int, bases: list[Base], work: Path, tally: Tally) -> None:
    """Make input ``number``, run it and note what it ended in."""
    rng = random.Random(f"{seed}-{number}")
    base, chosen = draw(bases, rng)
    out = work / "out"
    action, act = actions(base, out, rng)
    began = time.monotonic()
    with mutated(base, chosen, rng) as file:
        content = file.read_bytes() if file.is_file() and chosen is not SIDE_FILE else b""
        before = _state(base.path)
        ended = _ended(act)
        touched = _state(base.path) != before
    seconds = time.monotonic() - began
    tally.slowest = max(tally.slowest, seconds)
    tally.fields[chosen.name] += 1
    litter = sorted(path.name for path in work.iterdir() if "out" in path.name)
    wrong = ended if ended.startswith("bug") else "bug: the source was touched" if touched else ""
    if not wrong and not ended.startswith("success") and litter:
        wrong = f"bug: left {litter} after {ended}"
    for name in litter:
        shutil.rmtree(work / name)
    tally.ended[wrong.split(":")[0] or f"{action}: {ended.splitlines()[0]}"] += 1
    if wrong:
        kept = work / f"input-{number}"
        kept.write_bytes(content)
        tally.bugs.append(
            f"--seed {seed} --first {number} --count 1: {action}, {chosen.name} {file}\n{wrong}"
        )


def _state(root: Path) -> list[tuple[str, int, int]]:
    states = [(path, path.lstat()) for path in sorted(root.rglob("*"))]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in states]


def _ended(act: Callable[[], Any]) -> str:
    """``success``, the error's class, or ``bug`` with a traceback."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(SECONDS + HEADROOM, exit=True)
    try:
        act()
    except GlmconvError as error:
        try:
            str(error).encode("utf-8", "backslashreplace")
        except Exception:
            return "bug: the message cannot be shown\n" + traceback.format_exc()
        return type(error).__name__
    except (Exception, Hang):
        return "bug: another exception\n" + traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return "success"


def _hang(number: int, frame: object) -> None:
    raise Hang(f"over {SECONDS} s")


def limit_memory() -> None:
    """Let this process take no more than ``MEMORY`` beyond what it has: beyond it, MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def fuzz(count: int, seed: int, first: int = 0, work: Path | None = None) -> Tally:
    """Run ``count`` inputs from number ``first`` on; the working directory stays where there are bugs."""
    began, tally = time.monotonic(), Tally()
    shm = Path("/dev/shm")
    fast = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    folder = work or Path(tempfile.mkdtemp(prefix="glmconv-fuzz-", dir=fast))
    bases = make_bases(folder)
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        for number in range(first, first + count):
            one(number, seed, bases, folder, tally)
    finally:
        signal.signal(signal.SIGALRM, before)
    tally.seconds = time.monotonic() - began
    if not tally.bugs:
        shutil.rmtree(folder)
    return tally


def main(
    count: Annotated[int, typer.Option(min=1, help="Inputs to make.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Other inputs for another seed.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Number of the first input.")] = 0,
    work: Annotated[Path | None, typer.Option(help="New directory to work in (default: memory).")] = None,
    shown: Annotated[int, typer.Option(help="Bugs to print.")] = 5,
) -> None:
    """Run the fuzzer; the exit code is 1 where it found a bug."""
    limit_memory()
    tally = fuzz(count, seed, first, work)
    for bug in tally.bugs[:shown]:
        typer.echo(bug)
    for name, number in sorted(tally.ended.items()):
        typer.echo(f"{number:7,} {name}")
    typer.echo(", ".join(f"{name} {number:,}" for name, number in sorted(tally.fields.items())))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    typer.echo(
        f"{count:,} inputs of seed {seed} in {tally.seconds:.0f} s, slowest {tally.slowest:.2f} s, "
        f"peak {memory} MiB: {len(tally.bugs)} bugs"
    )
    if tally.bugs:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
