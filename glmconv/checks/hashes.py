"""Read every byte again and compare with what the manifest says was written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from glmconv.basics.abbreviated import brief
from glmconv.basics.errors import DataError, Defect, UsageError
from glmconv.basics.threads import Meter, OnStep, work_through
from glmconv.checks.findings import CheckReport, HashReport
from glmconv.engine import hash_range, tree_digest
from glmconv.formats.safetensors.checkpoint import plain_name
from glmconv.formats.torchdist.metadata import FILE_NAME as METADATA
from glmconv.formats.torchdist.metadata import read_metadata
from glmconv.source.manifest import FILE, read_manifest
from glmconv.storage.local import identify
from glmconv.storage.objects import OpenObject, StorageObject
from glmconv.values.reader import Reader

Range = tuple[int, int]
"""Start and end, in bytes."""

STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class _Payload:
    """A payload as the manifest names it; ``digest`` is hexadecimal."""

    name: str
    offset: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    literals: str
    payloads: list[_Payload]


@dataclass(frozen=True, slots=True)
class _Job:
    """A payload of file ``number``, or with ``payload`` None all that lies between payloads."""

    number: int
    file: _File
    payload: _Payload | None


def check_hashes(report: CheckReport, unit: Path, workers: int, progress: OnStep | None) -> None:
    """Compare every payload and literal of the published unit with ``glmconv.json``.

    Raises UsageError where there is no manifest, or one without hashes.
    """
    files = _manifest_files(unit)
    records = _records(unit) if (unit / METADATA).exists() else {}
    sources: list[StorageObject] = []
    jobs: list[_Job] = []
    wrong: list[Defect] = []
    for file in files:
        path = unit / file.path
        if not path.is_file():
            wrong.append(Defect("missing-file", "the manifest names it, it does not exist", str(path)))
            continue
        sources.append(identify(path))
        if sources[-1].size != file.size:
            said = f"has {sources[-1].size:,} bytes, the manifest says {file.size:,}"
            wrong.append(Defect("size", said, str(path), "copy the file again"))
        number = len(sources) - 1
        jobs += [_Job(number, file, payload) for payload in sorted(file.payloads, key=lambda p: p.offset)]
        if sources[-1].size == file.size and not (records is None and file.payloads):
            jobs.append(_Job(number, file, None))
    meter = Meter(sum(file.size for file in files), progress)

    def one(reader: Reader, job: _Job) -> Defect | None:
        try:
            if job.payload is None:
                return _check_rest(reader, job, (records or {}).get(job.file.path), meter)
            return _check_payload(reader, job, job.payload, meter)
        except DataError as error:
            return Defect("truncated", error.what, job.file.path, "copy the file again")

    wrong += [found for found in work_through(jobs, lambda: Reader(sources), one, workers) if found]
    report.findings += [*wrong, *_extra_files(unit, files)]
    payloads = sum(len(file.payloads) for file in files)
    report.hashes = HashReport(len(files), payloads, meter.done, len(wrong))
    report.bytes_read += meter.done


def _manifest_files(unit: Path) -> list[_File]:
    manifest = read_manifest(unit / FILE)
    if manifest is None:
        raise UsageError(
            f"--hash needs {FILE}, which is not in {unit}",
            hint="only checkpoints that glmconv wrote have one; --values reads all bytes of any other",
        )
    listed = manifest.get("files")
    try:
        files = [_file(entry) for entry in listed] if isinstance(listed, list) else []
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"its list of files is not understood: {error}", where=str(unit / FILE)) from error
    if not files or any(not payload.digest for file in files for payload in file.payloads):
        raise UsageError(
            f"{unit / FILE} holds no hashes", hint="the checkpoint was written with `convert --hash none`"
        )
    return files


def _file(entry: Mapping[str, Any]) -> _File:
    path, size, literals = str(entry["path"]), _bytes(entry["size"]), str(entry["literals"])
    if not plain_name(path):
        raise ValueError(f"{path!r} is not a path inside the checkpoint")
    payloads = [
        _Payload(str(name), _bytes(offset), _bytes(length), str(digest or ""))
        for name, _, offset, length, digest in entry["payloads"]
    ]
    if any(payload.offset + payload.size > size for payload in payloads):
        raise ValueError(f"a payload of {path!r} ends behind the file")
    return _File(path, size, literals, payloads)


def _bytes(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{brief(value)} is no number of bytes")
    return value


def _check_payload(reader: Reader, job: _Job, payload: _Payload, meter: Meter) -> Defect | None:
    leaves = hash_range(reader.object(job.number), payload.offset, payload.size)
    meter.add(payload.size)
    if tree_digest(leaves).hex() == payload.digest:
        return None
    what = f"its {payload.size:,} bytes at {payload.offset:,} are not those that were written"
    return Defect("hash", what, f"{job.file.path}: {payload.name}", "copy the file again, or convert again")


def _check_rest(reader: Reader, job: _Job, records: list[Range] | None, meter: Meter) -> Defect | None:
    """What lies between payloads: headers and tails hash as written, padding between them is zero."""
    payloads = [(payload.offset, payload.offset + payload.size) for payload in job.file.payloads]
    outside = _subtract([(0, job.file.size)], payloads)
    written = outside if records is None or not payloads else _subtract(records, payloads)
    hasher = xxhash.xxh3_128()
    held = reader.object(job.number)
    for data in _read(held, written):
        hasher.update(data)
    meter.add(sum(stop - start for start, stop in outside))
    if hasher.hexdigest() != job.file.literals:
        what = (
            "the bytes between its tensors are not those that were written"
            if payloads
            else ("its bytes are not those that were written")
        )
        return Defect("hash", what, job.file.path, "copy the file again, or convert again")
    if any(data.strip(b"\0") for data in _read(held, _subtract(outside, written))):
        return Defect("hash", "holds bytes in its padding, where zeros were written", job.file.path)
    return None


def _read(held: OpenObject, ranges: Iterable[Range]) -> Iterable[bytearray]:
    for start, stop in ranges:
        for at in range(start, stop, STEP):
            want = min(STEP, stop - at)
            data = bytearray(want)
            held.read_into(memoryview(data), at)
            yield data


def _subtract(ranges: Iterable[Range], holes: Iterable[Range]) -> list[Range]:
    """``ranges`` without ``holes``, sorted; both may be in any order and free of overlaps."""
    left: list[Range] = []
    cuts = iter(sorted(holes))
    cut = next(cuts, None)
    for start, stop in sorted(ranges):
        at = start
        while cut is not None and cut[0] < stop:
            if cut[1] > at:
                if cut[0] > at:
                    left.append((at, cut[0]))
                at = cut[1]
            if cut[1] > stop:
                break
            cut = next(cuts, None)
        if at < stop:
            left.append((at, stop))
    return left


def _records(unit: Path) -> dict[str, list[Range]] | None:
    """Where the records lie in each ``.distcp`` file; the rest of it is padding. None: unknown."""
    try:
        metadata = read_metadata(unit)
    except DataError:
        # The manifest's sizes and payload hashes still tell what is damaged, `.metadata` among it.
        return None
    found: dict[str, set[Range]] = {}
    for entry in metadata.tensors.values():
        for chunk in entry.chunks:
            found.setdefault(chunk.file, set()).add((chunk.offset, chunk.offset + chunk.length))
    for one in metadata.objects.values():
        found.setdefault(one.file, set()).add((one.offset, one.offset + one.length))
    return {file: sorted(ranges) for file, ranges in found.items()}


def _extra_files(unit: Path, files: Iterable[_File]) -> Iterable[Defect]:
    known = {file.path for file in files} | {FILE}
    for folder, _, names in os.walk(unit):
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(unit).as_posix()
            if path not in known:
                yield Defect("extra-file", "not in the manifest", str(unit / path), severity="warning")
