"""Blocks of tensors, read from pieces of every form, equal the tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.stored import StoredChunk, StoredTensor
from glmconv.source.locate import Located, Piece
from glmconv.storage.local import identify
from glmconv.storage.objects import StorageObject
from glmconv.storage.opened import OpenObjects
from glmconv.tables.expand import HfTensor
from glmconv.values import reader as reading
from glmconv.values.reader import Reader, floats, rounded, stored_view

FLOATS = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


def write(path: Path, data: bytes) -> StorageObject:
    path.write_bytes(data)
    return identify(path)


def numbers(rows: int, cols: int, dtype: type = np.uint16) -> np.ndarray:
    return (np.arange(rows * cols) % 65521).astype(dtype).reshape(rows, cols)


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    at = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return list(zip([0, *at], [*at, size], strict=True))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, bytes, list[Piece]]:
    """A matrix, bytes of a file, and the pieces in it: dense shards, or windows of wider matrices."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    values, data = numbers(rows, cols), b""
    pieces: list[Piece] = []
    for top, bottom in cuts(draw, rows):
        for left, right in cuts(draw, cols):
            part = values[top:bottom, left:right]
            before, after = draw(st.integers(0, 3)), draw(st.integers(0, 40))
            wide = np.full((part.shape[0], before + part.shape[1] + after), 0xDEAD, np.uint16)
            wide[:, before : before + part.shape[1]] = part
            at = len(data) + 2 * before
            pieces.append(Piece(0, at, top, left, bottom - top, right - left, 2 * wide.shape[1]))
            data += wide.tobytes()
    return values, data, draw(st.permutations(pieces))


@settings(max_examples=150, deadline=None)
@given(cut_tensors(), st.integers(1, 30))
def test_any_cut_reads_back(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[np.ndarray, bytes, list[Piece]], window: int
) -> None:
    values, data, pieces = cut
    file = write(tmp_path_factory.mktemp("cut") / "file", data)
    located = Located(HfTensor("x", values.shape), DType.BF16, tuple(pieces))
    with Reader([file]) as reader:
        assert np.array_equal(reader.whole(located), values)
        seen = np.zeros_like(values)
        for block in reader.blocks(located, window):
            height, width = block.bits.shape
            assert height * width <= max(window, 1)
            seen[block.row : block.row + height, block.col : block.col + width] += block.bits
        assert np.array_equal(seen, values)


def test_the_halves_of_heads_exchanged(tmp_path: Path) -> None:
    heads, dim, rope, cols = 3, 8, 4, 5
    hf = numbers(heads * dim, cols)
    by_head = hf.reshape(heads, dim, cols)
    stored = np.concatenate([by_head[:, rope:], by_head[:, :rope]], axis=1)
    file, step = write(tmp_path / "file", stored.tobytes()), cols * 2
    pieces = []
    for head in range(heads):
        pieces.append(Piece(0, (head * dim + dim - rope) * step, head * dim, 0, rope, cols, step))
        pieces.append(Piece(0, head * dim * step, head * dim + rope, 0, dim - rope, cols, step))
    located = Located(HfTensor("wq_b", hf.shape), DType.BF16, tuple(pieces))
    with Reader([file]) as reader:
        assert np.array_equal(reader.whole(located), hf)
        assert b"".join(map(bytes, reader.raw(located))) == hf.tobytes()


def test_two_dtypes_come_in_the_same_blocks(tmp_path: Path) -> None:
    rows, cols = 70, 31
    files = [write(tmp_path / "a", bytes(2 * rows * cols)), write(tmp_path / "b", bytes(4 * rows * cols))]
    shape = HfTensor("x", (rows, cols))
    narrow = Located(shape, DType.BF16, (Piece(0, 0, 0, 0, rows, cols, 2 * cols),))
    wide = Located(shape, DType.F32, (Piece(1, 0, 0, 0, rows, cols, 4 * cols),))
    with Reader(files) as one, Reader(files) as other:
        grids = [
            [(b.row, b.col, b.bits.shape) for b in reader.blocks(located, 100)]
            for reader, located in ((one, narrow), (other, wide))
        ]
    assert grids[0] == grids[1]
    assert len(grids[0]) == 24


def test_rows_far_apart_are_read_one_by_one(tmp_path: Path) -> None:
    rows, cols, stride = 8, 3, 1 << 26
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        for row in range(rows):
            stream.seek(row * stride)
            stream.write(numbers(rows, cols)[row].tobytes())
    located = Located(HfTensor("x", (rows, cols)), DType.BF16, (Piece(0, 0, 0, 0, rows, cols, stride),))
    with Reader([identify(path)]) as reader:
        assert np.array_equal(reader.whole(located), numbers(rows, cols))
        assert len(reader._strip) <= 2 * cols * reading.WASTE


def test_scalars_vectors_and_empty_tensors(tmp_path: Path) -> None:
    file = write(tmp_path / "file", numbers(1, 6).tobytes())
    with Reader([file]) as reader:
        scalar = Located(HfTensor("s", ()), DType.BF16, (Piece(0, 4, 0, 0, 1, 1, 2),))
        assert reader.whole(scalar).tolist() == [[2]]
        vector = Located(HfTensor("v", (6,)), DType.BF16, (Piece(0, 0, 0, 0, 6, 1, 2),))
        assert reader.whole(vector).reshape(-1).tolist() == list(range(6))
        assert list(reader.blocks(Located(HfTensor("e", (0, 6)), DType.BF16, ()))) == []


def test_an_element_of_a_stacked_tensor_cut_in_chunks(tmp_path: Path) -> None:
    """[layers, experts, rows, columns] in chunks of two layers, two experts and half the columns."""
    whole = numbers(4 * 4 * 6, 10).reshape(4, 4, 6, 10)
    data, chunks = b"", []
    for layer in (0, 2):
        for first in (0, 2):
            for left in (0, 5):
                part = whole[layer : layer + 2, first : first + 2, :, left : left + 5]
                chunks.append(StoredChunk((layer, first, 0, left), part.shape, 0, len(data)))
                data += np.ascontiguousarray(part).tobytes()
    file = write(tmp_path / "file", data)
    tensor = StoredTensor("fc2", DType.BF16, whole.shape, chunks)
    with Reader([file]) as reader:
        for layer in range(4):
            for expert in range(4):
                view = stored_view(tensor, (layer, expert))
                assert view.tensor.shape == (6, 10)
                assert np.array_equal(reader.whole(view), whole[layer, expert])


@pytest.mark.parametrize("first_row", [0, 1, 3, 4, 7])
def test_the_last_rows_of_a_tensor_sharded_by_rows(tmp_path: Path, first_row: int) -> None:
    whole = numbers(8, 3)
    chunks = [StoredChunk((0, 0), (4, 3), 0, 0), StoredChunk((4, 0), (4, 3), 0, 24)]
    file = write(tmp_path / "file", whole.tobytes())
    view = stored_view(StoredTensor("embedding", DType.BF16, (8, 3), chunks), first_row=first_row)
    with Reader([file]) as reader:
        assert np.array_equal(reader.whole(view), whole[first_row:])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
def test_values_of_bits_are_torchs(dtype: DType) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(1000) * 100, torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    stored = values.to(FLOATS[dtype])
    bits = stored.view({2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[dtype.itemsize]).numpy()
    assert np.array_equal(floats(bits, dtype), stored.double().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
def test_rounding_is_torchs(dtype: DType) -> None:
    torch.manual_seed(1)
    values = torch.cat([torch.randn(5000) * 10, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -0.0])])
    want = values.to(FLOATS[dtype]).double().numpy()
    assert np.array_equal(rounded(values.numpy(), dtype).astype(np.float64), want)


def test_values_of_eight_bit_floats_are_refused() -> None:
    with pytest.raises(DataError, match="F8_E4M3"):
        floats(np.zeros((1, 1), np.uint8), DType.F8_E4M3)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "model-00001.safetensors", bytes(10))
    located = Located(HfTensor("x", (3, 2)), DType.BF16, (Piece(0, 0, 0, 0, 3, 2, 4),))
    with Reader([file]) as reader, pytest.raises(DataError, match=r"byte 10, 2 bytes short") as caught:
        reader.whole(located)
    assert "model-00001.safetensors" in str(caught.value)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    located = Located(HfTensor("x", (1,)), DType.BF16, (Piece(0, 0, 0, 0, 1, 1, 2),))
    with (
        Reader([StorageObject(str(tmp_path / "gone"), 2)]) as reader,
        pytest.raises(StorageError, match="gone"),
    ):
        reader.whole(located)


def test_elements_in_no_piece_are_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "file", bytes(12))
    located = Located(HfTensor("x", (3, 2)), DType.BF16, (Piece(0, 0, 0, 0, 2, 2, 4),))
    with Reader([file]) as reader, pytest.raises(DataError, match="4 of 6 elements"):
        reader.whole(located)


def test_few_files_stay_open(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}", np.uint16(i).tobytes()) for i in range(9)]
    objects = OpenObjects(files, limit=3)
    opened = [objects.get(number) for number in (*range(9), 8)]
    view = memoryview(bytearray(2))
    opened[-1].read_into(view, 0)
    assert bytes(view) == np.uint16(8).tobytes()
    assert len({one.local_fd for one in opened}) == 3
    objects.close()
