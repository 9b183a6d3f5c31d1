"""``.metadata``: what is written is read back, and everything wrong in a foreign one is listed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.coverage import fault_of
from glmconv.formats.torchdist.metadata import (
    ALLOWED,
    Chunk,
    ObjectEntry,
    TensorEntry,
    parse_metadata,
    payload_offsets,
    read_metadata,
)
from glmconv.formats.torchdist.metadata_reading import entries_of
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.formats.torchdist.pickle.restricted import Policy, loads
from glmconv.formats.torchdist.pickle.shortcuts import FIELDS
from glmconv.formats.torchdist.record import frame


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> TensorEntry:
    """A tensor cut evenly into ``cuts[d]`` parts along each dimension."""
    sizes = tuple(size // cut for size, cut in zip(shape, cuts, strict=True))
    boxes: list[tuple[int, ...]] = [()]
    for size, cut in zip(sizes, cuts, strict=True):
        boxes = [(*box, size * i) for box in boxes for i in range(cut)]
    chunks = tuple(Chunk(box, sizes, f"__{i}_0.distcp", 5000 * i, 4000) for i, box in enumerate(boxes))
    return TensorEntry(DType.BF16, shape, chunks)


WHOLE = {
    "decoder.layers.0.mlp.linear_fc1.weight": grid((8, 6), (4, 1)),
    "decoder.layers.0.mlp.linear_fc2.weight": grid((6, 8), (2, 2)),
    "decoder.layers.0.mlp.router.expert_bias": replace(grid((16,), (1,)), dtype=DType.F32),
    "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": grid((2, 4, 6, 5), (2, 4, 2, 1)),
    "scalar": TensorEntry(DType.I64, (), (Chunk((), (), "__0_0.distcp", 1 << 41, 1600),)),
    "näme": grid((70_000, 1), (1, 1)),
}
OBJECTS = {
    "a._extra_state/shard_0_2": ObjectEntry("__0_0.distcp", 0, 1261),
    "a._extra_state/shard_1_2": ObjectEntry("__0_0.distcp", 0, 1261),
}
WHOLE["näme"] = replace(WHOLE["näme"], chunks=(replace(WHOLE["näme"].chunks[0], length=200_000),))


def test_what_is_written_is_read_back() -> None:
    metadata = parse_metadata(metadata_bytes(WHOLE, OBJECTS), "here")
    assert metadata.tensors == WHOLE
    assert metadata.objects == OBJECTS
    assert metadata.warnings == ()


def test_the_same_entries_give_the_same_bytes() -> None:
    assert metadata_bytes(WHOLE, OBJECTS) == metadata_bytes(dict(WHOLE), dict(OBJECTS))


sizes = st.integers(0, 5) | st.sampled_from([255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40])
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


@st.composite
def entries(draw: st.DrawFn) -> TensorEntry:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    return grid(tuple(2 * size for size in shape), tuple(draw(st.sampled_from([1, 2])) for _ in shape))


@st.composite
def shifted(draw: st.DrawFn) -> TensorEntry:
    entry = draw(entries())
    moved = [
        replace(chunk, file=draw(st.sampled_from(["a", "b/c", "__0_0.distcp"])), offset=draw(sizes))
        for chunk in entry.chunks
    ]
    return TensorEntry(draw(st.sampled_from(list(DType)[:3])), entry.shape, tuple(moved))


@given(st.dictionaries(names, shifted(), max_size=6), st.lists(names, max_size=4, unique=True))
@settings(max_examples=150, deadline=None)
def test_fast_and_slow_reading_agree_and_give_what_was_written(
    tensors: dict[str, TensorEntry], objects: list[str]
) -> None:
    stored = {name: ObjectEntry("a", 7, 9) for name in objects if name not in tensors}
    data = metadata_bytes(tensors, stored)
    fast = parse_metadata(data, "here")
    slow = entries_of(loads(data, "here", Policy(allowed=ALLOWED, fields=FIELDS)), "here")
    assert fast == slow
    assert (fast.tensors, fast.objects) == (tensors, stored)


def with_tensor(name: str, **changes: Any) -> bytes:
    return metadata_bytes({**WHOLE, name: replace(WHOLE[name], **changes)}, OBJECTS)


def with_chunk(index: int, **changes: Any) -> bytes:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    chunks = list(WHOLE[name].chunks)
    chunks[index] = replace(chunks[index], **changes)
    return with_tensor(name, chunks=tuple(chunks))


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (with_chunk(1, offsets=(0, 0)), "duplicate", "two places"),
        (with_chunk(1, offsets=(1, 0)), "chunks", r"\[0, 0\] and \[1, 0\] overlap"),
        (with_chunk(3, offsets=(7, 0)), "chunks", "leaves the shape"),
        (with_chunk(3, sizes=(1, 6)), "chunks", "cover at most 42 of 48"),
        (with_chunk(3, sizes=(2,)), "chunks", "leaves the shape"),
        (with_tensor(FC1, chunks=WHOLE[FC1].chunks[:3]), "chunks", "cover at most 36 of 48"),
        (with_tensor(FC1, chunks=()), "chunks", "cover at most 0 of 48"),
        (with_chunk(0, length=23), "length", "needs 24 bytes"),
        (with_chunk(0, file="/etc/passwd"), "path", "not a path inside"),
        (with_chunk(0, file="../other/__0_0.distcp"), "path", "not a path inside"),
        (with_chunk(0, file="a/../../b"), "path", "not a path inside"),
        (with_chunk(0, file="a\0b"), "path", "not a path inside"),
        (with_chunk(0, file="msc://bucket/x"), "path", "not a path inside"),
        (with_chunk(0, file=""), "path", "not a path inside"),
    ],
)
def test_each_defect_of_the_content_is_named(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_metadata(data, "there/.metadata")
    assert kind in {defect.kind for defect in caught.value.defects}
    assert "there/.metadata" in str(caught.value)


def test_all_defects_are_listed_at_once() -> None:
    tensors = {name: replace(entry, chunks=entry.chunks[1:]) for name, entry in WHOLE.items()}
    with pytest.raises(DataError) as caught:
        parse_metadata(metadata_bytes(tensors, OBJECTS), "here")
    assert len(caught.value.defects) >= len(WHOLE) - 1


def patched(old: bytes, new: bytes) -> bytes:
    data = metadata_bytes(WHOLE, OBJECTS)
    assert data.count(old) == 1
    assert len(old) == len(new)
    return data.replace(old, new)


def test_a_dtype_that_is_not_handled_is_named_with_its_tensor() -> None:
    data = metadata_bytes({"a": TensorEntry(DType.F32, (2,), (Chunk((0,), (2,), "f", 0, 2000),))}, {})
    data = data.replace(b"\x8c\x07float32", b"\x8c\x09complex64")
    data = data[:3] + (len(data) - 11).to_bytes(8, "little") + data[11:]
    with pytest.raises(DataError, match="tensor a has dtype complex64"):
        parse_metadata(data, "here")


def test_a_class_that_does_not_belong_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"torch\.distributed\.checkpoint\.filesystem\._StorageInfX"):
        parse_metadata(patched(b"_StorageInfo", b"_StorageInfX"), "here")


def test_an_attribute_that_does_not_belong_is_refused() -> None:
    with pytest.raises(DataError, match="relative_path, offset, length"):
        parse_metadata(patched(b"relative_path", b"relative_patX"), "here")


def test_a_shape_whose_opcodes_do_not_add_up_is_refused_by_fast_and_slow_reading() -> None:
    tensors = {f"t{i}": grid((251, 249 - i), (1, 1)) for i in range(3)}
    tensors = {
        name: replace(e, chunks=(replace(e.chunks[0], length=1 << 20),)) for name, e in tensors.items()
    }
    data = metadata_bytes(tensors, {})
    pair = b"K\xfbK\xf7\x86"  # 251, 247: read by a fast path, since the third tensor has no new text
    assert data.count(pair) == 1
    with pytest.raises(DataError, match="refused to read the pickle"):
        parse_metadata(data.replace(pair, pair[:-1] + b"\x85"), "here")


def test_a_stored_chunk_that_nothing_refers_to_is_a_warning() -> None:
    tensors = {name: entry for name, entry in WHOLE.items() if name != "scalar"}
    metadata = parse_metadata(_with_stray_place(tensors), "here")
    assert [warning.kind for warning in metadata.warnings] == ["unexpected"]
    assert "stray" in metadata.warnings[0].what


def _with_stray_place(tensors: Mapping[str, TensorEntry]) -> bytes:
    """Metadata with a place more than it has objects."""
    data = metadata_bytes(tensors, {"stray": ObjectEntry("f", 0, 10)})
    text = b"\x8c\x05stray\x94"
    at = data.index(text)
    end = data.index(b")\x81", at) + 2
    inserted = text + b"0"  # keep the text in the memo, drop it and the object from the dictionary
    cls = data[at + len(text) : end - 2]
    return data[:at] + inserted + cls + b"0" + data[end:]


def write_unit(path: Path, tensors: Mapping[str, TensorEntry], size: int = 1 << 20) -> None:
    path.joinpath(".metadata").write_bytes(metadata_bytes(tensors, {}))
    for name in {chunk.file for entry in tensors.values() for chunk in entry.chunks}:
        with path.joinpath(name).open("wb") as stream:
            stream.truncate(size)


def test_files_that_are_missing_or_too_short_are_defects(tmp_path: Path) -> None:
    tensors = {FC1: WHOLE[FC1]}
    write_unit(tmp_path, tensors)
    assert read_metadata(tmp_path).tensors == tensors
    (tmp_path / "__1_0.distcp").unlink()
    (tmp_path / "__2_0.distcp").write_bytes(bytes(13_999))
    with pytest.raises(DataError) as caught:
        read_metadata(tmp_path)
    assert {(defect.kind, defect.where) for defect in caught.value.defects} == {
        ("missing-file", "__1_0.distcp"),
        ("truncated", "__2_0.distcp"),
    }


def test_a_missing_metadata_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        read_metadata(tmp_path)


def test_payloads_are_found_and_wrong_records_all_listed(tmp_path: Path) -> None:
    good = frame(DType.BF16, (2, 6))
    other = frame(DType.F16, (2, 6))
    entry = grid((8, 6), (4, 1))
    chunks = tuple(
        replace(chunk, file="f", offset=37 + 3000 * i, length=good.length)
        for i, chunk in enumerate(entry.chunks)
    )
    tensors = {"w": replace(entry, chunks=chunks)}
    data = bytearray(20_000)
    for chunk, around in zip(chunks, (good, good, other, good), strict=True):
        data[chunk.offset : chunk.offset + around.length] = around.head + bytes(around.payload) + around.tail
    write_unit(tmp_path, tensors)
    (tmp_path / "f").write_bytes(data)
    metadata = read_metadata(tmp_path)
    with pytest.raises(DataError, match=r"w at \[4, 0\].*holds F16") as caught:
        payload_offsets(tmp_path, metadata)
    assert len(caught.value.defects) == 1
    data[chunks[2].offset : chunks[2].offset + good.length] = good.head + bytes(24) + good.tail
    (tmp_path / "f").write_bytes(data)
    assert payload_offsets(tmp_path, metadata) == {
        "w": tuple(37 + 3000 * i + len(good.head) for i in range(4))
    }
    assert payload_offsets(tmp_path, metadata, []) == {}


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=200)
def test_coverage_agrees_with_counting_every_element(shape: list[int], random: Any, recut: bool) -> None:
    """Cut a box at random, then maybe move one piece: the check must agree with a count."""
    shape = [2 * size for size in shape]
    boxes = [(tuple([0] * len(shape)), tuple(shape))]
    for _ in range(random.randrange(8)):
        offsets, extent = boxes.pop(random.randrange(len(boxes)))
        dim = random.randrange(len(shape))
        cut = random.randrange(extent[dim] + 1)
        left, right = list(extent), list(extent)
        left[dim], right[dim] = cut, extent[dim] - cut
        moved = list(offsets)
        moved[dim] += cut
        boxes += [(offsets, tuple(left)), (tuple(moved), tuple(right))]
    if recut:
        index = random.randrange(len(boxes))
        offsets, extent = boxes[index]
        boxes[index] = (tuple(max(0, o - random.randrange(2)) for o in offsets), extent)
    counts: dict[tuple[int, ...], int] = {}
    for offsets, extent in boxes:
        cells: list[tuple[int, ...]] = [()]
        for start, size in zip(offsets, extent, strict=True):
            cells = [(*cell, i) for cell in cells for i in range(start, start + size)]
        for cell in cells:
            counts[cell] = counts.get(cell, 0) + 1
    volume = 1
    for size in shape:
        volume *= size
    covered_once = len(counts) == volume and set(counts.values()) == {1}
    chunks = tuple(Chunk(offsets, extent, "f", 0, 1) for offsets, extent in boxes)
    assert (fault_of(TensorEntry(DType.U8, tuple(shape), chunks)) == "") == covered_once


def test_a_stacked_tensor_in_24064_chunks_is_checked_quickly() -> None:
    entry = grid((94, 128, 4, 4), (94, 128, 2, 1))
    begin = time.process_time()
    assert fault_of(entry) == ""
    assert time.process_time() - begin < 3


def test_chunks_that_are_cut_absurdly_are_refused_in_bounded_time() -> None:
    bars = [Chunk((0, i), (4000, 1), "f", 0, 1) for i in range(4000)]
    comb = [Chunk((i, 4000 + i % 7), (1, 1), "f", 0, 1) for i in range(4000)]
    entry = TensorEntry(DType.U8, (4000, 4000), tuple(bars + comb[:1] + comb))
    begin = time.process_time()
    assert fault_of(entry)
    assert time.process_time() - begin < 5


def _many(count: int) -> dict[str, TensorEntry]:
    chunks = [((0, 0), (1024, 6144)), ((1024, 0), (1024, 6144))]
    return {
        f"decoder.layers.{i // 700}.mlp.experts.experts.{i}.weight": TensorEntry(
            DType.BF16,
            (2048, 6144),
            tuple(Chunk(at, size, f"__0_{i % 16}.distcp", i << 24, 12_584_496) for at, size in chunks),
        )
        for i in range(count)
    }


@pytest.mark.parametrize(("work", "seconds"), [("write", 6), ("read", 12)])
def test_20000_tensors_of_two_chunks_take_a_moment(
    work: str, seconds: float, benchmark_data: Callable[[], tuple[dict[str, TensorEntry], bytes]]
) -> None:
    """Generous bounds of processor time: a quiet machine needs a tenth."""
    tensors, data = benchmark_data()
    begin = time.process_time()
    if work == "write":
        metadata_bytes(tensors, {})
    else:
        parse_metadata(data, "here")
    assert time.process_time() - begin < seconds / 3


@pytest.fixture(scope="module")
def benchmark_data() -> Callable[[], tuple[dict[str, TensorEntry], bytes]]:
    tensors = _many(20_000)
    data = metadata_bytes(tensors, {})
    return lambda: (tensors, data)
