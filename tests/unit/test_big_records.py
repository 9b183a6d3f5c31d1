"""Records of 4 GiB and more: cut by rows where we write, found where a trainer wrote them whole."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.commands.convert import RunOptions, convert
from glmconv.formats.torchdist.entries import TensorEntry
from glmconv.formats.torchdist.metadata import parse_metadata
from glmconv.formats.torchdist.record import MAX_PAYLOAD, payload_offset
from glmconv.plan.planner import TargetOptions
from glmconv.plan.to_torch_dist import row_cuts
from tests.support.big_checkpoints import (
    EMBEDDING,
    GATE,
    HEAD,
    UP,
    mark_rows,
    marker,
    read_marks,
    sparse_qwen3,
)
from tests.support.conversions import to_hf, to_megatron

WORD = "embedding.word_embeddings.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
OUTPUT = "output_layer.weight"


def entry_of(unit: Path, name: str) -> TensorEntry:
    return parse_metadata((unit / ".metadata").read_bytes(), str(unit)).tensors[name]


def records(unit: Path, name: str, scratch: Path) -> dict[tuple[int, ...], Tensor]:
    """Each record of a tensor by its offsets, mapped by torch's own reader: no memory is taken."""
    found = {}
    for number, chunk in enumerate(entry_of(unit, name).chunks):
        alone = scratch / f"{name}.{number}.pt"
        with (unit / chunk.file).open("rb") as source, alone.open("wb") as target:
            target.truncate(chunk.length)
            copy_data(source.fileno(), chunk.offset, target.fileno(), 0, chunk.length)
        found[chunk.offsets] = torch.load(alone, mmap=True, weights_only=True)
        assert list(found[chunk.offsets].shape) == list(chunk.sizes)
    return found


def copy_data(source: int, start: int, target: int, to: int, length: int) -> None:
    """Copy what is no hole."""
    at, end = start, start + length
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # a hole up to the file's end
            return
        stop = min(os.lseek(source, at, os.SEEK_HOLE), end)
        if at < stop:
            os.pwrite(target, os.pread(source, stop - at, at), to + at - start)
        at = stop


@pytest.mark.parametrize(
    ("shape", "dtype", "pieces"),
    [
        ((163_840, 7168), DType.F32, 2),
        ((128_256, 16_384), DType.F32, 2),
        ((154_880, 6144), DType.F32, 1),
        ((154_880, 6144), DType.F64, 2),
        ((163_840, 7168), DType.BF16, 1),
        ((1 << 20, 16_384), DType.F32, 17),
        ((3 << 30, 1), DType.F32, 4),  # as the rows of a vector are counted
        ((0, 7168), DType.F32, 1),
        ((7, 0), DType.F32, 1),
    ],
    ids=str,
)
def test_rows_are_cut_into_the_fewest_even_ranges(shape: tuple[int, int], dtype: DType, pieces: int) -> None:
    width = shape[1] * dtype.itemsize
    cuts = row_cuts(0, shape[0], width, MAX_PAYLOAD)
    assert len(cuts) == pieces
    assert (cuts[0][0], cuts[-1][1]) == (0, shape[0])
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    sizes = {stop - start for start, stop in cuts}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) * width < MAX_PAYLOAD


@pytest.mark.parametrize(
    ("vocab", "hidden", "padded", "cuts"),
    [
        (163_840, 7168, None, [0, 81_920]),  # Kimi K2
        (163_840, 7168, 163_968, [0, 81_984]),
        (128_256, 16_384, None, [0, 64_128]),  # Llama-3.1-405B
        (154_880, 6144, None, [0]),  # GLM-5: 3.8 GB
        (154_880, 6144, 400_001, [0, 133_333, 266_667]),  # the last record is padding alone
    ],
)
def test_embedding_and_head_of_real_size_are_cut_and_come_back(
    tmp_path: Path, vocab: int, hidden: int, padded: int | None, cuts: list[int]
) -> None:
    hf = sparse_qwen3(tmp_path / "hf", vocab, hidden, tied=False)
    edges = sorted({0, vocab - 1, *(row for cut in cuts[1:] for row in (cut - 1, cut) if row < vocab)})
    mark_rows(hf, EMBEDDING, edges)
    mark_rows(hf, HEAD, edges)
    unit = to_megatron(hf, tmp_path / "m", padded_vocab=padded)
    for name in (WORD, OUTPUT):
        entry = entry_of(unit, name)
        assert entry.shape == (padded or vocab, hidden)
        assert sorted(chunk.offsets for chunk in entry.chunks) == [(cut, 0) for cut in cuts]
        assert all(chunk.length < 1 << 32 for chunk in entry.chunks)
        for (first, _), rows in records(unit, name, tmp_path).items():
            for row in (edge - first for edge in edges if 0 <= edge - first < len(rows)):
                at = row + first
                assert rows[row, 0].item() == marker(at, 0)
                assert rows[row, -1].item() == marker(at, hidden - 1)
    back = to_hf(tmp_path / "m", tmp_path / "back")
    expected = [marker(row, col) for row in edges for col in (0, hidden - 1)]
    assert [read_marks(back, name, edges) for name in (EMBEDDING, HEAD)] == [expected, expected]
    on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert on_disk < 32 << 20  # holes of the source are holes of what is written


def test_gate_and_up_of_a_stacked_layer_are_cut_each_for_itself(tmp_path: Path) -> None:
    ffn, hidden = 300_000, 4096
    hf = sparse_qwen3(tmp_path / "hf", 64, hidden, ffn=ffn)
    half, edges = ffn // 2, [0, ffn // 2 - 1, ffn // 2, ffn - 1]
    mark_rows(hf, GATE, edges)
    mark_rows(hf, UP, edges)
    unit = to_megatron(hf, tmp_path / "m")
    found = records(unit, FC1, tmp_path)
    assert sorted(found) == [(0, 0, 0), (0, half, 0), (0, ffn, 0), (0, ffn + half, 0)]
    for (_, first, _), rows in found.items():
        for row in (edge - first % ffn for edge in edges if 0 <= edge - first % ffn < half):
            assert rows[0, row, 0].item() == marker(row + first % ffn, 0)
    back = to_hf(tmp_path / "m", tmp_path / "back")
    expected = [marker(row, col) for row in edges for col in (0, hidden - 1)]
    assert [read_marks(back, name, edges) for name in (GATE, UP)] == [expected, expected]


def test_a_row_of_4_gib_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    hf = sparse_qwen3(tmp_path / "hf", 2, 1 << 30)
    with pytest.raises(DataError) as caught:
        to_megatron(hf, tmp_path / "m")
    defects = [str(defect) for defect in caught.value.defects]
    assert any(WORD in text and "one row of it has 4294967296 bytes" in text for text in defects)
    assert not (tmp_path / "m").exists()


def save_without_data(tensor: Tensor, path: Path) -> None:
    """What ``torch.save`` writes around a tensor's data, the data a hole."""
    with torch.serialization.skip_data():
        torch.save(tensor, path)


@pytest.mark.parametrize(
    "size", [MAX_PAYLOAD - 1, MAX_PAYLOAD, (1 << 32) - 1000, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 5 << 30]
)
def test_torchs_records_around_4_gib_are_found(tmp_path: Path, size: int) -> None:
    path = tmp_path / "record"
    save_without_data(torch.empty(size, dtype=torch.uint8), path)
    with path.open("r+b") as stream:
        at = payload_offset(stream.fileno(), DType.U8, (size,), 0, path.stat().st_size, "here")
        os.pwrite(stream.fileno(), b"\x01", at)
        os.pwrite(stream.fileno(), b"\x02", at + size - 1)
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert (mapped[0].item(), mapped[1].item(), mapped[-1].item()) == (1, 0, 2)


def test_a_trainers_record_of_more_than_4_gib_is_a_source(tmp_path: Path) -> None:
    vocab, hidden = 163_840, 7168
    edges = [0, 81_919, 81_920, vocab - 1]
    hf = sparse_qwen3(tmp_path / "hf", vocab, hidden)
    mark_rows(hf, EMBEDDING, edges)
    unit = to_megatron(hf, tmp_path / "m")
    _join_records(unit, WORD)
    assert [chunk.length > 1 << 32 for chunk in entry_of(unit, WORD).chunks] == [True]
    back = to_hf(tmp_path / "m", tmp_path / "back")
    assert read_marks(back, EMBEDDING, edges) == [
        marker(row, col) for row in edges for col in (0, hidden - 1)
    ]
    again = convert(
        tmp_path / "m", tmp_path / "again", target=TargetOptions(to="megatron"), run=RunOptions(workers=1)
    )
    assert len(entry_of(again.path, WORD).chunks) == 2


def _join_records(unit: Path, name: str) -> None:
    """Store a tensor as one record, as one rank of a trainer does: torch's record, torch's metadata."""
    entry = entry_of(unit, name)
    file = unit / "__1_0.distcp"
    save_without_data(torch.empty(entry.shape, dtype=torch.float32), file)
    with file.open("r+b") as stream:
        width = prod(entry.shape[1:]) * entry.dtype.itemsize
        at = payload_offset(stream.fileno(), entry.dtype, entry.shape, 0, file.stat().st_size, "here")
        for chunk in entry.chunks:
            with (unit / chunk.file).open("rb") as source:
                start = payload_offset(
                    source.fileno(), entry.dtype, chunk.sizes, chunk.offset, chunk.length, "here"
                )
                length = chunk.sizes[0] * width
                copy_data(source.fileno(), start, stream.fileno(), at + chunk.offsets[0] * width, length)
    metadata = FileSystemReader(unit).read_metadata()
    first = MetadataIndex(name, torch.Size((0, 0)))
    info = metadata.storage_data[first]
    info.relative_path, info.offset, info.length = file.name, 0, file.stat().st_size
    for index in [i for i in metadata.storage_data if i.fqn == name and i != first]:
        del metadata.storage_data[index]
    shape = torch.Size(entry.shape)
    described = metadata.state_dict_metadata[name]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), shape)]
    with (unit / ".metadata").open("wb") as stream:
        pickle.dump(metadata, stream)
