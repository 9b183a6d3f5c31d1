"""Small plans with every kind of move, and a naive executor to compare the engine with."""

from __future__ import annotations

import hashlib
import os
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from glmconv.basics.dtypes import DType
from glmconv.plan.plan import HASH_LEAF, Move, Payload, Plan, TargetFile
from glmconv.source.conditions import Condition, Equal
from glmconv.storage.local import identify
from glmconv.storage.objects import StorageObject


@dataclass
class Planner:
    """Lays out payloads one after the other, on sources of random bytes."""

    root: Path
    seed: int = 0
    sources: list[StorageObject] = field(default_factory=list)
    targets: list[TargetFile] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def source(self, size: int, data: bytes | None = None) -> int:
        """A new source file; random bytes unless ``data`` is given."""
        path = self.root / f"source-{len(self.sources)}"
        path.write_bytes(self.random.randbytes(size) if data is None else data)
        return self.adopt(path)

    def adopt(self, path: Path) -> int:
        """A source file that exists."""
        self.sources.append(identify(path, "header"))
        return len(self.sources) - 1

    def target(self, path: str) -> TargetFile:
        self.targets.append(TargetFile(path, 0))
        return self.targets[-1]

    def payload(self, target: TargetFile, size: int, moves: list[Move], *, residue: int = -1) -> Payload:
        """Put a payload behind what is there, after a literal; ``residue`` is its offset modulo 4096."""
        text = f"<{len(target.payloads)}>".encode()
        target.literals.append((target.size, text))
        offset = target.size + len(text)
        if residue >= 0:
            offset += (residue - offset) % 4096
        payload = Payload(f"t{len(target.payloads)}", DType.U8, (size,), offset, size, tuple(moves))
        target.payloads.append(payload)
        target.size = offset + size
        return payload

    def straight(self, target: TargetFile, src: int, src_offset: int, size: int) -> Payload:
        """A payload copied from one range, congruent modulo 4096."""
        return self.payload(target, size, [Move(src, src_offset, 0, size)], residue=src_offset % 4096)

    def plan(self, tail: bytes = b"the end") -> Plan:
        """The finished plan; each target ends in a literal."""
        for target in self.targets:
            target.literals.append((target.size, tail))
            target.size += len(tail)
        described = repr((self.sources, self.targets, self.conditions)).encode()
        digest = hashlib.sha256(described).hexdigest()
        return Plan(self.sources, self.targets, self.conditions, digest=digest)


def column_shards(src: int, rows: int, widths: list[int], offset: int = 0) -> list[Move]:
    """Dense shards ``[rows, width]``, one after the other in the source, side by side in the payload."""
    moves, column = [], 0
    for width in widths:
        moves.append(Move(src, offset, column, width, rows, width, sum(widths)))
        offset += rows * width
        column += width
    return moves


def columns_of(src: int, rows: int, stride: int, column: int, width: int) -> Move:
    """Columns of a source matrix as a dense payload ``[rows, width]``."""
    return Move(src, column, 0, width, rows, stride, width)


def mixed_plan(root: Path, seed: int = 0, scale: int = 1) -> Plan:
    """Straight, fused, strided, cast, padded, empty and tiny payloads in four files of odd offsets."""
    planner = Planner(root, seed)
    rng = planner.random
    sources = [planner.source((6 << 20) * scale + rng.randrange(9999)) for _ in range(3)]
    floats = np.random.default_rng(seed).standard_normal(300_000 * scale).astype(np.float32)
    sources.append(planner.source(0, floats.tobytes()))
    for number in range(4):
        target = planner.target(f"folder-{number % 2}/file-{number}")
        src = sources[number % 3]
        for _ in range(3):
            size = rng.randrange(1, (5 << 20) * scale)
            planner.straight(target, src, rng.randrange(planner.sources[src].size - size), size)
        planner.payload(target, 600 * 3000, column_shards(src, 600, [1000, 1500, 500], 77))
        planner.payload(target, 40 * 5000, [columns_of(src, 40, 30_000, 1234, 5000)])
        planner.payload(target, 0, [])
        planner.payload(target, 3 << 20, [Move(src, 5, 0, 1 << 20), Move(src, 99, 2 << 20, 1000)])
        big = 200_000  # long runs of a fused tensor
        fused = [Move(src, 0, 0, big, 3, big, 2 * big), Move(src, 3 * big, big, big, 3, big, 2 * big)]
        planner.payload(target, 6 * big, fused)
        cast = (DType.F32, DType.BF16)
        planner.payload(target, 400_000, [Move(sources[3], 0, 0, 800_000, cast=cast)])
        rows = [
            Move(sources[3], 4096, 0, 400, 500, 400, 400, cast),
            Move(sources[3], 0, 200, 400, 500, 400, 400, cast),
        ]
        planner.payload(target, 200 * 1000, rows)
        for _ in range(200):
            size = rng.randrange(1, 300)
            planner.straight(target, src, rng.randrange(100_000), size)
        planner.straight(target, src, 4096, (2 << 20) + 17)
    planner.target("only-a-literal")
    pair = (planner.sources[0].address, 0, 0)
    planner.conditions.append(Equal("left", "right", pair[1], 10, pair[2], 10, 3 << 20))
    return planner.plan()


def expected_files(plan: Plan) -> dict[str, bytes]:
    """Every target file, built run by run with no regard for speed."""
    data = [Path(source.address).read_bytes() for source in plan.sources]
    files = {}
    for target in plan.targets:
        out = bytearray(target.size)
        for offset, literal in target.literals:
            out[offset : offset + len(literal)] = literal
        for payload in target.payloads:
            for move in payload.moves:
                for run in range(move.count):
                    start = move.src_offset + run * move.src_stride
                    read = data[move.src][start : start + move.run]
                    at = payload.offset + move.dst_offset + run * move.dst_stride
                    read = read if move.cast is None else slow_cast(read, *move.cast)
                    out[at : at + len(read)] = read
        files[target.path] = bytes(out)
    return files


def slow_cast(read: bytes, source: DType, target: DType) -> bytes:
    """F32 to BF16 only: the two candidates around each value, the nearer one, ties to the even one."""
    if (source, target) != (DType.F32, DType.BF16):
        raise ValueError("the naive executor casts F32 to BF16 only")
    bits = np.frombuffer(read, np.uint32).astype(np.uint64)
    low = bits >> 16
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low % 2 == 1))
    return bytes((low + up).astype(np.uint16).tobytes())


def expected_digests(plan: Plan, files: dict[str, bytes]) -> dict[tuple[str, int], bytes]:
    """Leaf digests of every payload, from whole files."""
    digests = {}
    for target in plan.targets:
        for index, payload in enumerate(target.payloads):
            data = files[target.path][payload.offset : payload.offset + payload.size]
            leaves = [data[i : i + HASH_LEAF] for i in range(0, len(data), HASH_LEAF)]
            digests[target.path, index] = b"".join(
                struct.pack(">QQ", *divmod(xxhash.xxh3_128(leaf).intdigest(), 1 << 64)) for leaf in leaves
            )
    return digests


def read_tree(root: Path) -> dict[str, bytes]:
    """All files under ``root`` by relative path."""
    return {os.fspath(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
