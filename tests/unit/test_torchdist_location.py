"""Which checkpoint a path means, and which layout a directory holds."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from glmconv.basics.errors import DataError, StorageError
from glmconv.source.torchdist.location import Located, detect_layout, locate


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 1 and 20 and a release, without any tracker."""
    root = tmp_path / "checkpoints"
    for name in ("iter_0000001", "iter_0000020", "release"):
        (root / name).mkdir(parents=True)
        (root / name / ".metadata").touch()
    return root


def track(root: Path, text: str) -> Path:
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    return root


def track_as_bridge(root: Path, step: int) -> Path:
    pickle = (
        b"\x80\x02}X\x04\x00\x00\x00stepctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
        b"IntStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00))\x89ccollections\nOrderedDict\n)RtRs."
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x/data.pkl", pickle)
        archive.writestr("x/data/0", step.to_bytes(4, "little", signed=True))
    (root / "latest_train_state.pt").write_bytes(out.getvalue())
    return root


def test_a_root_means_what_its_tracker_says(root: Path) -> None:
    assert locate(track(root, "release\n")) == Located(root, root / "release", None)
    assert locate(track(root, "20")) == Located(root, root / "iter_0000020", 20)


def test_a_root_of_megatron_bridge_means_its_own_tracker_first(root: Path) -> None:
    track_as_bridge(root, 20)
    assert locate(root).iteration == 20
    assert locate(track(root, "1")).iteration == 20


def test_a_unit_means_itself(root: Path) -> None:
    assert locate(root / "iter_0000020") == Located(root, root / "iter_0000020", 20)
    assert locate(root / "release") == Located(root, root / "release", None)


def test_a_unit_of_another_name_is_its_own_root(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    assert locate(tmp_path) == Located(tmp_path, tmp_path, None)


@pytest.mark.parametrize("text", ["", "latest", "-1", "1.5", "9" * 30, "²", "../elsewhere"])
def test_a_tracker_that_says_nothing_is_a_data_error(root: Path, text: str) -> None:
    with pytest.raises(DataError, match="neither a number nor"):
        locate(track(root, text))


def test_a_tracker_that_names_an_incomplete_iteration_is_a_data_error(root: Path) -> None:
    with pytest.raises(DataError, match="iter_0000300") as caught:
        locate(track(root, "300"))
    assert "iter_0000001, iter_0000020, release" in caught.value.hint


def test_a_bridge_tracker_without_step_is_a_data_error(root: Path) -> None:
    with pytest.raises(DataError, match="no step"):
        locate(track_as_bridge(root, -3))


def test_a_root_without_tracker_lists_what_it_has(root: Path) -> None:
    with pytest.raises(StorageError, match="latest_checkpointed_iteration") as caught:
        locate(root)
    assert "iter_0000020" in caught.value.hint


def test_a_path_that_is_no_directory_is_a_storage_error(tmp_path: Path) -> None:
    for call in (locate, detect_layout):
        with pytest.raises(StorageError, match="not a directory"):
            call(tmp_path / "missing")


def test_the_layout_is_told_by_the_files(root: Path, tmp_path: Path) -> None:
    assert detect_layout(root / "release") == "megatron"
    assert detect_layout(track(root, "20")) == "megatron"
    hugging_face = tmp_path / "iter_0000001"
    hugging_face.mkdir()
    (hugging_face / "config.json").touch()
    assert detect_layout(hugging_face) == "hf"
    (hugging_face / "config.json").unlink()
    (hugging_face / "model.safetensors").touch()
    assert detect_layout(hugging_face) == "hf"


def test_neither_and_both_layouts_are_errors(root: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(StorageError, match="neither"):
        detect_layout(empty)
    with pytest.raises(StorageError, match="neither") as caught:
        detect_layout(root)
    assert "iter_0000001" in caught.value.hint
    (root / "release" / "config.json").touch()
    assert detect_layout(root / "release") == "megatron"
    (root / "release" / "model.safetensors").touch()
    with pytest.raises(DataError, match="both"):
        detect_layout(root / "release")
