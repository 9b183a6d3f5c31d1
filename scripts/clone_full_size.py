"""Convert a checkpoint of the real size and check where everything went; needs root and loop mounts.

On a sparse XFS image, GLM-5.2 at its full 1.5 TB is put together from extents of a few gigabytes of
random data (real blocks, no holes), with known content at both ends of some 200 tensors. Then the
real ``glmconv convert`` runs, to Megatron and back, with nothing in the page cache, timed from
outside; every block of both results is compared with the source. With ``--sparse`` the
checkpoint is made of holes and lies in a directory as it is (ext4; others may write to that disk
meanwhile, so look at what the output itself has allocated). Example:
``python scripts/clone_full_size.py --dir /scratch --dialect mcore --dialect slime``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench import tree_rss_anon
from checkpoint_headers import ITEM_SIZES, make_headers_only
from file_extents import (
    FileMap,
    allocated_bytes,
    clone,
    compare,
    forget,
    mounted_image,
    settle,
    used_bytes,
)
from full_size_places import DIALECTS, Marked, TorchDist, markers, pieces

BLOCK = 4096
SAMPLE = 0.1
"""Seconds between two looks at the memory of a running process tree."""

SAMPLED = 200
SAMPLED_LAYERS = (0, 3, 40, 74, 78)
"""Dense; sparse with and without an indexer of its own; the last with an indexer; MTP."""

IMAGE_BYTES = 3 << 40


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source: its file, the byte where it begins, shape and bytes of an element."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    itemsize: int

    def byte(self, row: int, offset: int = 0) -> int:
        return self.begin + row * math.prod(self.shape[1:]) * self.itemsize + offset


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors directory, from the headers."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin = 8 + length + entry["data_offsets"][0]
                tensors[name] = Tensor(file, begin, tuple(entry["shape"]), ITEM_SIZES[entry["dtype"]])
    return tensors


def fill_from_pool(directory: Path, pool: Path, pool_bytes: int, piece_bytes: int) -> int:
    """Give every shard of a sparse checkpoint real blocks: pieces of a file of random data.

    Returns how many pieces.
    """
    generator = np.random.Generator(np.random.SFC64(0))
    with pool.open("xb", buffering=0) as file:
        for _ in range(pool_bytes >> 24):
            file.write(generator.bytes(1 << 24))
        os.fsync(file.fileno())
    choose, count = random.Random(0), 0
    with pool.open("rb") as source:
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("r+b", buffering=0) as file:
                size = path.stat().st_size
                start = 8 + int.from_bytes(file.read(8), "little")
                at, end = -(-start // BLOCK) * BLOCK, size // BLOCK * BLOCK
                os.pwrite(file.fileno(), generator.bytes(at - start), start)
                os.pwrite(file.fileno(), generator.bytes(size - end), end)
                while at < end:
                    length = min(end - at, choose.randrange(piece_bytes // 2, piece_bytes) // BLOCK * BLOCK)
                    offset = choose.randrange((pool_bytes - length) // BLOCK + 1) * BLOCK
                    clone(source.fileno(), offset, file.fileno(), at, length)
                    at, count = at + length, count + 1
    return count


def sampled(tensors: Mapping[str, Tensor]) -> list[Marked]:
    """Markers for both ends of every kind of tensor, and of whole experts chosen at random."""
    layers = tuple(f"model.layers.{layer}." for layer in SAMPLED_LAYERS)
    names = [n for n in tensors if ".experts." not in n and (n.startswith(layers) or ".layers." not in n)]
    experts = sorted({n.rpartition(".")[0].rpartition(".")[0] for n in tensors if ".experts." in n})
    chosen = [experts[0], experts[-1]]
    chosen += random.Random(1).sample(experts[1:-1], max(1, (SAMPLED - len(names)) // 3 - 1))
    names += [f"{expert}.{kind}_proj.weight" for expert in chosen for kind in ("gate", "up", "down")]
    return [mark for n in names for mark in markers(n, tensors[n].shape, tensors[n].itemsize)]


def write_marks(tensors: Mapping[str, Tensor], marks: list[Marked]) -> None:
    for mark in marks:
        tensor = tensors[mark.tensor]
        with tensor.file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), mark.data, tensor.byte(mark.row, mark.offset))


def check_marks_hf(directory: Path, marks: list[Marked]) -> None:
    """Every marker is where the headers of ``directory`` say. Raises ``ValueError``."""
    tensors = read_tensors(directory)
    for mark in marks:
        tensor = tensors[mark.tensor]
        _expect(tensor.file, tensor.byte(mark.row, mark.offset), mark)


def check_marks_megatron(
    unit: Path, tensors: Mapping[str, Tensor], marks: list[Marked], config: Mapping[str, Any], dialect: str
) -> None:
    """Every marker is where the reference of the dialect says. Raises ``ValueError``."""
    torch_dist = TorchDist(unit)
    for mark in marks:
        tensor = tensors[mark.tensor]
        places = pieces(mark.tensor, tensor.shape[0], config, dialect)
        piece = next(one for one in places if one.first <= mark.row < one.end)
        index = (*piece.index[:-1], piece.index[-1] + mark.row - piece.first)
        file, byte = torch_dist.place(piece.stored, index, tensor.itemsize)
        _expect(file, byte + mark.offset, mark)


def _expect(file: Path, at: int, mark: Marked) -> None:
    with file.open("rb") as stream:
        stream.seek(at)
        if stream.read(len(mark.data)) != mark.data:
            raise ValueError(f"row {mark.row} of {mark.tensor} is not at byte {at} of {file.name}")


def check_every_tensor(
    unit: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dialect: str
) -> tuple[int, int]:
    """All bytes of all tensors are where the reference says: the source's own blocks, or equal when read.

    Returns the bytes compared and, of them, those that were read. Raises ``ValueError``.
    """
    torch_dist, maps = TorchDist(unit), _Maps()
    total = read = 0
    for name, tensor in tensors.items():
        for piece in pieces(name, tensor.shape[0], config, dialect):
            begin, size = tensor.byte(piece.first), tensor.byte(piece.end) - tensor.byte(piece.first)
            file, byte = torch_dist.place(piece.stored, piece.index, tensor.itemsize)
            read += compare(maps[tensor.file], begin, maps[file], byte, size)
            total += size
    return total, read


class _Maps(dict[Path, FileMap]):
    def __missing__(self, path: Path) -> FileMap:
        self[path] = FileMap(path)
        return self[path]


def check_equal(source: Path, back: Path) -> tuple[int, int]:
    """Both directories hold the same files, byte for byte. Raises ``ValueError``.

    Returns the bytes compared and, of them, those that were read.
    """
    files = sorted(path.name for path in source.iterdir())
    if files != sorted(path.name for path in back.iterdir() if path.name != "glmconv.json"):
        raise ValueError("the way back gave other files")
    total = read = 0
    for name in files:
        ours, theirs = FileMap(source / name), FileMap(back / name)
        if ours.size != theirs.size:
            raise ValueError(f"{theirs.path}: {theirs.size} bytes, not {ours.size}")
        total, read = total + ours.size, read + compare(ours, 0, theirs, 0, ours.size)
    return total, read


def measured(source: Path, target: Path, image: Path | None, *options: str) -> dict[str, Any]:
    """Run one conversion as a process; what it says of itself, and what is seen from outside.

    What lies on ``image`` is read from the disk, not from memory.
    """
    if image is not None:
        settle(target.parent)
        forget([*(path for path in source.rglob("*") if path.is_file()), image])
    before, load = used_bytes(target.parent), os.getloadavg()[0]
    command = [sys.executable, "-m", "glmconv", "convert", str(source), str(target), "--json", "--quiet"]
    began = time.monotonic()
    process = subprocess.Popen([*command, "--hash", "none", *options], stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_rss_anon(process.pid))
        time.sleep(SAMPLE)
    wall = time.monotonic() - began
    said = json.loads(process.communicate()[0] or "{}")
    if process.returncode:
        raise SystemExit(f"glmconv ended with {process.returncode}")
    os.sync()
    return {
        "wall_seconds": round(wall, 1),
        "with_sync_seconds": round(time.monotonic() - began, 1),
        "plan_seconds": said["plan_seconds"],
        "peak_rss_anon_mib": round(peak / 2**20),
        "disk_grew_mb": round((used_bytes(target.parent) - before) / 1e6),
        "output_allocated_mb": round(allocated_bytes(target) / 1e6),
        "bytes": said["bytes"],
        "load_before": round(load, 1),
    }


def round_trip(work: Path, image: Path | None, marks: list[Marked], dialect: str) -> dict[str, Any]:
    """To a dialect and back, each way measured and checked; the results are removed."""
    source, root, back = work / "hf", work / "megatron", work / "back"
    tensors, config = read_tensors(source), json.loads((source / "config.json").read_text())
    there = measured(source, root, image, "--to", "megatron", "--dialect", dialect)
    check_marks_megatron(root / "release", tensors, marks, config, dialect)
    there |= _compared(check_every_tensor(root / "release", tensors, config, dialect))
    home = measured(root, back, image, "--to", "hf")
    check_marks_hf(back, marks)
    home |= _compared(check_equal(source, back))
    shutil.rmtree(root)
    shutil.rmtree(back)
    return {f"hf to {dialect}": there, f"{dialect} to hf": home}


def _compared(result: tuple[int, int]) -> dict[str, Any]:
    total, read = result
    return {"compared_gb": round(total / 1e9), "of_them_by_reading_gb": round(read / 1e9, 1)}


def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where to work.")] = Path("full-size"),
    model: Annotated[str, typer.Option(help="A full-size model of make_checkpoint.py.")] = "glm-5.2",
    dialect: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(DIALECTS)}.")] = None,
    pool_gib: Annotated[int, typer.Option(help="Random data on the image, in GiB.")] = 4,
    piece_mib: Annotated[int, typer.Option(help="Largest extent of the source, in MiB.")] = 4096,
    sparse: Annotated[bool, typer.Option("--sparse", help="Holes in --dir itself, no image.")] = False,
    rounds: Annotated[int, typer.Option(help="How often each dialect is converted.")] = 1,
) -> None:
    """Make the checkpoint, convert it both ways, check it, print figures."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    work = directory.resolve() / "glmconv-full-size"
    work.mkdir(parents=True)
    try:
        place = nullcontext(work / "plain") if sparse else mounted_image(work, "xfs", IMAGE_BYTES)
        with place as root:
            root.mkdir(exist_ok=True)
            source = make_headers_only(model, root / "hf")
            count, pool_bytes = 0, pool_gib << 30
            if not sparse:
                count = fill_from_pool(source, root / "pool", pool_bytes, min(piece_mib << 20, pool_bytes))
            tensors = read_tensors(source)
            marks = sampled(tensors)
            write_marks(tensors, marks)
            head = {
                "model": model,
                "bytes": sum(path.stat().st_size for path in source.iterdir()),
                "tensors": len(tensors),
                "sampled": len({mark.tensor for mark in marks}),
                "source_extents": count,
                "machine": f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} cores",
                "python": platform.python_version(),
            }
            print(json.dumps(head))
            for number in range(rounds):
                for name in dialect or ["mcore"]:
                    for way, figures in round_trip(
                        root, None if sparse else work / "xfs.image", marks, name
                    ).items():
                        print(json.dumps({"round": number + 1, "way": way, **figures}), flush=True)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    typer.run(main)
