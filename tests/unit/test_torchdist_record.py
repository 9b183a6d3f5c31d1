"""The bytes around a tensor in a ``.distcp`` file, and finding a payload in anyone's record."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, GlmconvError
from glmconv.formats.torchdist.record import MAX_PAYLOAD, contiguous_strides, frame, payload_offset

SHAPES = [(), (1,), (0,), (3, 0), (7, 5), (300, 70_000), (2, 3, 4, 5), (1,) * 20]

Place = Callable[[bytes], int]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Place]:
    """Write bytes to a file and open it: ``fd = opened(data)``."""
    fds: list[int] = []

    def place(data: bytes) -> int:
        path = tmp_path / f"{len(fds)}.distcp"
        path.write_bytes(data)
        fds.append(os.open(path, os.O_RDONLY))
        return fds[-1]

    yield place
    for fd in fds:
        os.close(fd)


def record(dtype: DType, shape: tuple[int, ...], fill: int = 7) -> bytes:
    around = frame(dtype, shape)
    return around.head + bytes([fill]) * around.payload + around.tail


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if max(shape, default=0) < 1000], ids=str)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32, DType.F8_E4M3, DType.U64], ids=lambda d: d.label)
def test_a_frame_is_a_sound_zip_archive_around_its_payload(dtype: DType, shape: tuple[int, ...]) -> None:
    data = record(dtype, shape)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        stored = infos["archive/data/0"]
        assert stored.file_size == frame(dtype, shape).payload
        assert {info.CRC for info in infos.values()} == {0}
        assert {info.compress_type for info in infos.values()} == {zipfile.ZIP_STORED}
    assert set(infos) == {
        f"archive/{name}"
        for name in (
            "data.pkl",
            ".format_version",
            ".storage_alignment",
            "byteorder",
            "data/0",
            "version",
            ".data/serialization_id",
        )
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.label)
def test_a_head_keeps_the_payload_aligned_and_counts_its_length(dtype: DType, shape: tuple[int, ...]) -> None:
    around = frame(dtype, shape)
    assert len(around.head) % 64 == 0
    assert around.length == len(around.head) + around.payload + len(around.tail)


def test_a_record_of_4_gib_is_refused_and_one_just_below_is_not() -> None:
    assert frame(DType.U8, (MAX_PAYLOAD - 1,)).length < (1 << 32) - 1
    with pytest.raises(DataError, match="under 4 GiB") as caught:
        frame(DType.BF16, (MAX_PAYLOAD // 2,))
    assert "chunks" in caught.value.hint


def test_the_payload_may_lie_at_any_residue_of_a_page(opened: Place) -> None:
    around = frame(DType.BF16, (3, 4))
    for residue in (0, 1, 63, 704, 4095):
        start = (residue - len(around.head)) % 4096
        data = b"\xaa" * start + record(DType.BF16, (3, 4)) + b"\xaa" * 10
        found = payload_offset(opened(data), DType.BF16, (3, 4), start, around.length, "here")
        assert found % 4096 == residue
        assert data[found : found + 24] == b"\x07" * 24


def test_a_record_of_another_dtype_or_shape_is_refused(opened: Place) -> None:
    fd, length = opened(record(DType.BF16, (3, 4))), frame(DType.BF16, (3, 4)).length
    for dtype, shape in ((DType.F16, (3, 4)), (DType.BF16, (4, 3)), (DType.BF16, (12,))):
        with pytest.raises(DataError, match=r"holds BF16 \[3, 4\]"):
            payload_offset(fd, dtype, shape, 0, length, "here")


def foreign(pickle: bytes, payload: bytes, *, byteorder: bytes = b"little", method: int = 0) -> bytes:
    """A record as another version of torch may lay it out."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", byteorder)
        archive.writestr("archive/data/0", payload)
    return out.getvalue()


def tensor_pickle(
    strides: bytes = b"K\x04K\x01\x86", offset: bytes = b"K\x00", numel: bytes = b"K\x0c"
) -> bytes:
    """``data.pkl`` of a bf16 tensor of shape [3, 4]."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nBFloat16Storage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + numel
        + b"tQ"
        + offset
        + b"K\x03K\x04\x86"
        + strides
        + b"\x89ccollections\nOrderedDict\n)Rt"
        + b"R."
    )


def locate(data: bytes, opened: Place) -> int:
    return payload_offset(opened(data), DType.BF16, (3, 4), 0, len(data), "here")


def test_a_record_that_is_laid_out_otherwise_is_found_by_its_directory(opened: Place) -> None:
    data = foreign(tensor_pickle(), bytes(range(24)))
    found = locate(data, opened)
    assert data[found : found + 24] == bytes(range(24))


def test_a_view_into_a_larger_storage_is_found_behind_its_offset(opened: Place) -> None:
    data = foreign(tensor_pickle(offset=b"K\x05", numel=b"K\x20"), bytes(range(64)))
    found = locate(data, opened)
    assert data[found : found + 24] == bytes(range(10, 34))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (foreign(tensor_pickle(strides=b"K\x01K\x03\x86"), bytes(24)), "strided"),
        (foreign(tensor_pickle(offset=b"K\x05"), bytes(24)), "ends at 34"),
        (foreign(tensor_pickle(), bytes(20)), "ends at 24"),
        (foreign(tensor_pickle(), bytes(24), byteorder=b"big"), "big-endian"),
        (foreign(tensor_pickle(), bytes(24), method=zipfile.ZIP_DEFLATED), "compressed"),
        (foreign(b"\x80\x02N.", bytes(24)), "does not hold a tensor"),
        (foreign(b"\x80\x02cos\nsystem\n(X\x01\x00\x00\x00atR.", bytes(24)), r"names 'os\.system'"),
        (b"not a zip archive, but long enough to have an end record", "no end record"),
        (b"", "only 0 bytes"),
    ],
    ids=["strided", "behind", "short", "big-endian", "deflated", "no tensor", "hostile", "no zip", "empty"],
)
def test_what_is_not_a_plain_record_is_refused(data: bytes, message: str, opened: Place) -> None:
    with pytest.raises(DataError, match=message):
        locate(data, opened)


def test_a_file_that_ends_inside_a_record_is_a_data_error(opened: Place) -> None:
    whole = record(DType.BF16, (3, 4))
    for end in (0, 100, 705, len(whole) - 1):
        with pytest.raises(DataError, match="ends at byte"):
            payload_offset(opened(whole[:end]), DType.BF16, (3, 4), 0, len(whole), "here")


def test_mutated_records_end_in_an_offset_or_a_data_error(tmp_path: Path) -> None:
    whole = foreign(tensor_pickle(), bytes(24))
    fd = os.open(tmp_path / "mutated", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, whole, 0)
        for position in range(len(whole)):
            for value in (0x00, 0x7F, 0xFF, whole[position] ^ 1):
                os.pwrite(fd, bytes([value]), position)
                try:
                    found = payload_offset(fd, DType.BF16, (3, 4), 0, len(whole), "here")
                except GlmconvError:
                    continue
                assert 0 < found <= len(whole) - 24
            os.pwrite(fd, whole[position : position + 1], position)
    finally:
        os.close(fd)


def test_a_large_record_of_another_writer_is_found_by_its_zip64_fields(opened: Place, tmp_path: Path) -> None:
    payload = 5 << 30
    head = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 14, 0)
    pickle = tensor_pickle(numel=b"\x8a\x05" + (payload // 2).to_bytes(5, "little"))
    pickle = pickle.replace(b"K\x03K\x04\x86", b"J\x00\x00\x00\x50K\x02\x86").replace(
        b"K\x04K\x01\x86", b"K\x02K\x01\x86"
    )
    first = b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", 0, 0, 0, 0, 0, 0, len(pickle), len(pickle), 16, 0)
    start = len(first) + 16 + len(pickle)
    entries = b"PK\x01\x02" + struct.pack(
        "<HHHHHHIIIHHHHHII", 0, 0, 0, 0, 0, 0, 0, len(pickle), len(pickle), 16, 0, 0, 0, 0, 0, 0
    )
    entries += b"archive/data.pkl"
    entries += b"PK\x01\x02" + struct.pack(
        "<HHHHHHIIIHHHHHII", 0, 0, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 14, 20, 0, 0, 0, 0, start
    )
    entries += b"archive/data/0" + struct.pack("<HHQQ", 1, 16, payload, payload)
    directory = start + len(head) + 14 + payload
    end = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 2, 2, len(entries), directory)
    end += b"PK\x06\x07" + struct.pack("<IQI", 0, directory + len(entries), 1)
    end += b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 2, 2, len(entries), 0xFFFFFFFF, 0)
    path = tmp_path / "large.distcp"
    with path.open("wb") as stream:  # sparse: the payload takes no space
        stream.write(first + b"archive/data.pkl" + pickle + head + b"archive/data/0")
        stream.seek(directory)
        stream.write(entries + end)
    fd = os.open(path, os.O_RDONLY)
    try:
        found = payload_offset(fd, DType.BF16, (0x50000000, 2), 0, path.stat().st_size, "here")
    finally:
        os.close(fd)
    assert found == start + len(head) + 14


def test_strides_count_empty_dimensions_as_one() -> None:
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)
    assert contiguous_strides(()) == ()
