"""Broken torch_dist checkpoints: each refused clearly, nothing executed, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError, UsageError
from glmconv.commands.check import check
from glmconv.commands.convert import convert
from glmconv.commands.inspect import inspect
from glmconv.formats.stored import StoredChunk, StoredTensor
from glmconv.formats.torchdist.archive import saved
from glmconv.plan.planner import TargetOptions
from glmconv.source.open import open_source
from glmconv.source.source import SourceOptions
from glmconv.source.torchdist.spellings import normalise
from tests.support.plain import Meddler, edit_json, plain, refused

NORM = "decoder.final_layernorm.weight"
EXPERTS = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight"
WQ_B = "decoder.layers.0.self_attention.core_attention.indexer.linear_wq_b.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``sound(model, dialect)``: a torch_dist root, made once, never to be changed."""
    made: dict[tuple[str, str], Path] = {}
    folder = tmp_path_factory.mktemp("sound")

    def make(model: str, dialect: str = "mcore", **changes: Any) -> Path:
        key = (f"{model}{changes}", dialect)
        if key not in made:
            hf = plain(model, **changes).write(folder / f"hf-{len(made)}")
            root = folder / f"root-{len(made)}"
            convert(hf, root, target=TargetOptions(to="megatron", dialect=dialect))
            made[key] = root
        return made[key]

    return make


@pytest.fixture
def root(sound: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a dense checkpoint, to be broken."""
    return shutil.copytree(sound("qwen3"), tmp_path / "root")


@pytest.fixture
def glm(sound: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint with experts, indexers and an MTP layer, to be broken."""
    return shutil.copytree(sound("glm-5.2"), tmp_path / "root")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def edit_metadata(root: Path, edit: Callable[[Metadata], object]) -> None:
    """Change ``.metadata`` by torch's own classes."""
    file = root / "release" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata, protocol=4))


def places(metadata: Metadata, name: str) -> list[tuple[MetadataIndex, Any]]:
    """Where the chunks of a tensor lie."""
    return [(index, place) for index, place in metadata.storage_data.items() if index.fqn == name]


def tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def rename(metadata: Metadata, old: str, new: str) -> None:
    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    for index, place in places(metadata, old):
        del metadata.storage_data[index]
        metadata.storage_data[MetadataIndex(new, index.offset)] = place


def distcp(root: Path) -> Path:
    """The first file of tensors."""
    return sorted((root / "release").glob("*.distcp"))[1]


def put_chunk(entry: TensorStorageMetadata, number: int, offsets: list[int], sizes: list[int]) -> None:
    entry.chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class Hostile:
    """Unpickling it writes a file: what no reader of checkpoints may let happen."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class TestFiles:
    def test_sound_checkpoint_converts(self, root: Path, out: Path) -> None:
        assert convert(root, out).path == out

    def test_missing_distcp(self, root: Path, out: Path) -> None:
        file = distcp(root)
        file.unlink()
        refused(root, out, DataError, file.name, "No such file or directory")

    def test_truncated_distcp(self, root: Path, out: Path) -> None:
        file = distcp(root)
        os.truncate(file, file.stat().st_size - 1000)
        refused(root, out, DataError, file.name, "ends at byte", "copy it again")

    @pytest.mark.parametrize("piece", [b"PK\x03\x04", b"_rebuild_tensor_v2", b"BFloat16Storage"])
    def test_corrupt_record(self, root: Path, out: Path, piece: bytes) -> None:
        file = distcp(root)
        data = bytearray(file.read_bytes())
        at = data.index(piece)
        data[at : at + len(piece)] = b"?" * len(piece)
        file.write_bytes(data)
        refused(root, out, DataError, file.name, "records are not sound")

    def test_zeros_instead_of_a_file(self, root: Path, out: Path) -> None:
        """What a filesystem leaves of a file that was never flushed."""
        distcp(root).write_bytes(bytes(distcp(root).stat().st_size))
        refused(root, out, DataError, distcp(root).name, "records are not sound")

    def test_distcp_of_another_checkpoint(self, root: Path, sound: Callable[..., Path], out: Path) -> None:
        other = sound("qwen3-untied")
        shutil.copy(distcp(other), distcp(root))
        refused(root, out, DataError, distcp(root).name)


class TestMetadata:
    def test_missing(self, root: Path, out: Path) -> None:
        (root / "release" / ".metadata").unlink()
        refused(root, out, DataError, "its tracker names release", "not a complete torch_dist checkpoint")

    @pytest.mark.parametrize("keep", [0, 1, 100, -100, -1])
    def test_truncated(self, root: Path, out: Path, keep: int) -> None:
        file = root / "release" / ".metadata"
        file.write_bytes(file.read_bytes()[:keep])
        refused(root, out, DataError, ".metadata", "refused to read the pickle")

    def test_hostile(self, root: Path, out: Path, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        (root / "release" / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
        refused(root, out, DataError, ".metadata", "system", "does not belong in such a file")
        assert not marker.exists()

    def test_hostile_deep_inside(self, root: Path, out: Path, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        edit_metadata(root, lambda metadata: setattr(metadata, "planner_data", [Hostile(marker)]))
        refused(root, out, DataError, ".metadata", "system")
        assert not marker.exists()

    def test_some_other_pickle(self, root: Path, out: Path) -> None:
        (root / "release" / ".metadata").write_bytes(pickle.dumps({"a": 1}))
        refused(root, out, DataError, ".metadata", "holds no torch.distributed.checkpoint Metadata")

    @pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "", "s3://x/y"])
    def test_path_that_leaves_the_checkpoint(self, root: Path, out: Path, path: str) -> None:
        def lead_out(metadata: Metadata) -> None:
            places(metadata, NORM)[0][1].relative_path = path

        edit_metadata(root, lead_out)
        refused(root, out, DataError, NORM, "not a path inside the checkpoint")

    def test_chunk_behind_the_end_of_its_file(self, root: Path, out: Path) -> None:
        def move(metadata: Metadata) -> None:
            places(metadata, NORM)[0][1].offset += 1 << 40

        edit_metadata(root, move)
        refused(root, out, DataError, NORM, "ends at byte")

    def test_record_shorter_than_its_data(self, root: Path, out: Path) -> None:
        def shorten(metadata: Metadata) -> None:
            places(metadata, NORM)[0][1].length = 100

        edit_metadata(root, shorten)
        refused(root, out, DataError, NORM, "needs 128 bytes, its record has 100")

    def test_two_tensors_in_one_record(self, glm: Path, out: Path) -> None:
        one, two = (f"decoder.layers.{layer}.input_layernorm.weight" for layer in (0, 1))

        def alias(metadata: Metadata) -> None:
            (index, _), (_, place) = places(metadata, one)[0], places(metadata, two)[0]
            metadata.storage_data[index] = place

        edit_metadata(glm, alias)
        refused(glm, out, DataError, one, two, "lie in the same bytes")

    def test_tensor_without_a_place(self, root: Path, out: Path) -> None:
        edit_metadata(root, lambda metadata: metadata.storage_data.pop(places(metadata, NORM)[0][0]))
        refused(root, out, DataError, NORM, "has no place for its chunk at [0]")

    def test_overlapping_chunks(self, root: Path, out: Path) -> None:
        def overlap(metadata: Metadata) -> None:
            (index, place) = places(metadata, NORM)[0]
            entry = tensor(metadata, NORM)
            entry.chunks.append(ChunkStorageMetadata(torch.Size([32]), torch.Size([32])))
            metadata.storage_data[MetadataIndex(index.fqn, torch.Size([32]))] = place

        edit_metadata(root, overlap)
        refused(root, out, DataError, NORM, "its chunks at [0] and [32] overlap")

    def test_hole_between_chunks(self, root: Path, out: Path) -> None:
        edit_metadata(root, lambda metadata: put_chunk(tensor(metadata, NORM), 0, [0], [60]))
        refused(root, out, DataError, NORM, "cover at most 60 of 64 elements")

    def test_chunk_that_leaves_the_shape(self, root: Path, out: Path) -> None:
        edit_metadata(root, lambda metadata: put_chunk(tensor(metadata, NORM), 0, [0], [68]))
        refused(root, out, DataError, NORM, "leaves the shape [64]")

    def test_missing_expert_chunk(self, glm: Path, out: Path) -> None:
        edit_metadata(glm, lambda metadata: tensor(metadata, EXPERTS).chunks.pop(4))
        refused(glm, out, DataError, EXPERTS, "cover at most")

    def test_other_dtype_in_the_record(self, root: Path, out: Path) -> None:
        def relabel(metadata: Metadata) -> None:
            tensor(metadata, NORM).properties.dtype = torch.float16

        edit_metadata(root, relabel)
        refused(root, out, DataError, NORM, "the record holds BF16 [64], but .metadata says F16 [64]")

    def test_other_shape_in_the_record(self, glm: Path, out: Path) -> None:
        def reshape(metadata: Metadata) -> None:
            entry = tensor(metadata, WQ_B)
            entry.size = torch.Size(list(entry.size)[::-1])
            put_chunk(entry, 0, [0, 0], list(entry.size))

        edit_metadata(glm, reshape)
        refused(glm, out, DataError, WQ_B, "the record holds BF16 [48, 36], but .metadata says BF16 [36, 48]")

    def test_quantised_weights(self, root: Path, out: Path) -> None:
        def relabel(metadata: Metadata) -> None:
            tensor(metadata, NORM).properties.dtype = torch.complex64

        edit_metadata(root, relabel)
        refused(root, out, DataError, NORM, "complex64, which is not handled")


class TestNames:
    def test_missing_tensor(self, root: Path, out: Path) -> None:
        def drop(metadata: Metadata) -> None:
            del metadata.state_dict_metadata[NORM]

        edit_metadata(root, drop)
        refused(root, out, DataError, "model.norm.weight", "missing")

    def test_unknown_tensor(self, root: Path, out: Path) -> None:
        edit_metadata(root, lambda metadata: rename(metadata, NORM, "decoder.final_norm.weight"))
        words = (
            "decoder.final_norm.weight",
            "belongs to no rule",
            "model.norm.weight",
            "(missing, unexpected)",
        )
        refused(root, out, DataError, *words)

    def test_mixed_dialects(self, glm: Path, out: Path) -> None:
        new = "decoder.layers.0.self_attention.wq_b.weight"
        edit_metadata(glm, lambda metadata: rename(metadata, WQ_B, new))
        words = (new, "belongs to no rule", "model.layers.0.self_attn.indexer.wq_b.weight")
        refused(glm, out, DataError, *words)
        (glm / "release" / "glmconv.json").unlink()
        refused(glm, out, DataError, *words)

    def test_one_tensor_in_two_spellings(self, glm: Path, out: Path) -> None:
        name = "mtp.layers.0.transformer_layer.input_layernorm.weight"
        other = "decoder.layers.0.input_layernorm.weight"
        edit_metadata(glm, lambda metadata: rename(metadata, other, name.replace("transformer", "mtp_model")))
        refused(glm, out, DataError, name, "in two spellings")

    @pytest.mark.parametrize(("interleave", "ambiguous"), [(True, False), (False, True)])
    def test_slime_or_miles(
        self, sound: Callable[..., Path], tmp_path: Path, out: Path, interleave: bool, ambiguous: bool
    ) -> None:
        """The two use the same names; where they would order channels differently, nobody can tell."""
        kept = sound("glm-5", "slime", indexer_rope_interleave=interleave)
        root = shutil.copytree(kept, tmp_path / "root")
        (root / "release" / "glmconv.json").unlink()
        if ambiguous:
            words = (
                "slime and miles",
                "order this model's tensors differently",
                "--dialect slime or --dialect miles",
            )
            refused(root, out, DataError, *words)
        assert open_source(root, SourceOptions(dialect="miles")).layout == "miles"
        if not ambiguous:
            assert convert(root, out).path == out


def stored(name: str, *shape: int, dtype: DType = DType.BF16) -> StoredTensor:
    return StoredTensor(name, dtype, shape, [StoredChunk((0,) * len(shape), shape, 0, 0)])


class TestSpellings:
    """Keys of ``singleton_local_shards``: one expert a key, gate and up apart."""

    FC1 = "decoder.layers.3.mlp.experts.experts.{}.linear_fc1.weight"

    def test_experts_are_joined(self) -> None:
        made = normalise({str(i): stored(self.FC1.format(i), 4, 3) for i in range(2)})
        assert {name: one.shape for name, one in made.items()} == {self.FC1.replace("{}.", ""): (2, 4, 3)}

    def test_two_numbers_that_mean_the_same_expert_lose_none(self) -> None:
        made = normalise({text: stored(self.FC1.format(text), 4, 3) for text in ("0", "1", "01")})
        assert made[self.FC1.replace("{}.", "")].shape == (2, 4, 3)
        assert made[self.FC1.format("01")].shape == (4, 3)

    def test_number_of_thousands_of_digits(self) -> None:
        name = self.FC1.format("9" * 5000)
        assert list(normalise({name: stored(name, 4, 3)})) == [name]

    def test_experts_of_different_shapes(self) -> None:
        tensors = {"0": stored(self.FC1.format(0), 4, 3), "1": stored(self.FC1.format(1), 4, 4)}
        with pytest.raises(DataError, match="differ in shape or dtype"):
            normalise(tensors)

    def test_gate_and_up_of_different_dtypes(self) -> None:
        gate, up = stored("x.weight_w", 4, 3), stored("x.weight_v", 4, 3, dtype=DType.F32)
        with pytest.raises(DataError, match="gate and up differ"):
            normalise({gate.name: gate, up.name: up})

    def test_gate_and_up_that_are_scalars(self) -> None:
        gate, up = stored("x.weight_w"), stored("x.weight_v")
        with pytest.raises(DataError, match="gate and up differ"):
            normalise({gate.name: gate, up.name: up})


class TestHfConfig:
    def test_none(self, root: Path, out: Path) -> None:
        shutil.rmtree(root / "release" / "hf")
        refused(root, out, DataError, "carries no Hugging Face config", "--origin-hf-dir")

    def test_given(self, root: Path, out: Path, tmp_path: Path) -> None:
        (root / "release" / "hf").rename(tmp_path / "origin")
        options = SourceOptions(origin_hf_dir=tmp_path / "origin")
        assert convert(root, out, source=options).path == out

    def test_given_directory_has_none(self, root: Path, out: Path, tmp_path: Path) -> None:
        options = SourceOptions(origin_hf_dir=tmp_path / "nowhere")
        refused(root, out, StorageError, "nowhere", "config.json", source=options)

    def test_of_another_model(self, root: Path, out: Path, tmp_path: Path) -> None:
        other = plain("qwen3-moe").write(tmp_path / "other")
        options = SourceOptions(origin_hf_dir=other)
        refused(root, out, DataError, "qwen3_moe", "was written as qwen3", source=options)
        (root / "release" / "glmconv.json").unlink()
        refused(root, out, DataError, "missing", "unexpected", source=options)

    def test_of_another_size(self, root: Path, out: Path) -> None:
        edit_json(root / "release" / "hf" / "config.json", lambda config: config.update(hidden_size=32))
        refused(root, out, DataError, "shape", "asks for", NORM)

    def test_of_a_quantised_release(self, root: Path, out: Path) -> None:
        block = {"quantization_config": {"quant_method": "fp8"}}
        edit_json(root / "release" / "hf" / "config.json", lambda config: config.update(block))
        refused(root, out, DataError, "quantised (fp8)", "BF16 release")

    def test_vocabulary_larger_than_the_stored_one(self, root: Path, out: Path) -> None:
        edit_json(root / "release" / "hf" / "config.json", lambda config: config.update(vocab_size=385))
        refused(root, out, DataError, "embedding.word_embeddings.weight", "[384, 64]", "[385, 64]")

    def test_promised_mtp_that_is_not_there(self, glm: Path, out: Path) -> None:
        def drop(metadata: Metadata) -> None:
            for name in [name for name in metadata.state_dict_metadata if name.startswith("mtp.")]:
                if isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata):
                    del metadata.state_dict_metadata[name]

        edit_metadata(glm, drop)
        refused(glm, out, DataError, "promises 1 MTP layer(s), the checkpoint lacks them", "--drop-mtp")

    def test_denied_mtp_that_is_there(self, glm: Path, out: Path) -> None:
        config = glm / "release" / "hf" / "config.json"
        edit_json(config, lambda config: config.update(num_nextn_predict_layers=0))
        words = (
            "mtp.layers.0: the files hold layer 0",
            "8 layers and 0 MTP layers (num_nextn_predict_layers)",
        )
        refused(glm, out, DataError, *words)


class TestOriginRecord:
    """The record that lets an export cut the same shards again decides names of files: it must be sound."""

    @pytest.mark.parametrize(
        "name", ["../x.safetensors", "/x.safetensors", "config.json", "a/../b.safetensors"]
    )
    def test_odd_shard(self, root: Path, out: Path, name: str) -> None:
        def rename_shard(record: dict[str, Any]) -> None:
            record["shards"][name] = record["shards"].pop(sorted(record["shards"])[0])

        edit_json(root / "release" / "hf" / "glmconv-origin.json", rename_shard)
        refused(root, out, DataError, "glmconv-origin.json", "not a plain name of a shard")

    def test_index_of_other_shards(self, root: Path, out: Path) -> None:
        def edit(record: dict[str, Any]) -> None:
            index = json.loads(record["index"])
            one = sorted(record["shards"])[0]
            index["weight_map"] = dict.fromkeys(index["weight_map"], one)
            record["index"] = json.dumps(index)

        edit_json(root / "release" / "hf" / "glmconv-origin.json", edit)
        refused(root, out, DataError, "its index is not that of its shards")

    def test_no_index_though_there_are_two_shards(self, root: Path, out: Path) -> None:
        edit_json(root / "release" / "hf" / "glmconv-origin.json", lambda record: record.update(index=None))
        refused(root, out, DataError, "its index is not that of its shards")

    @pytest.mark.parametrize("text", ["", "{}x", "[]", '{"a": 1}', '{"a": {"data_offsets": []}}', "\ud800"])
    def test_shard_that_is_no_header(self, root: Path, out: Path, text: str) -> None:
        file = root / "release" / "hf" / "glmconv-origin.json"
        edit_json(file, lambda record: record["shards"].update({sorted(record["shards"])[0]: text}))
        refused(root, out, DataError, "glmconv-origin.json")

    def test_record_of_other_tensors_is_not_used(self, root: Path, out: Path, tmp_path: Path) -> None:
        other = plain("qwen3-moe").write(tmp_path / "other")
        convert(other, tmp_path / "other-root")
        record = "release/hf/glmconv-origin.json"
        shutil.copy(tmp_path / "other-root" / record, root / record)
        assert (convert(root, out).path / "model.safetensors").is_file()


class TestManifest:
    @pytest.mark.parametrize(
        "changes",
        [
            {"widened": {"model.norm.weight": []}},
            {"widened": {"model.layers.3.mlp.gate.e_score_correction_bias": "U8"}},
            {"widened": 3},
            {"dialect": ["mcore"]},
            {"dialect": "../mcore"},
            {"tool": "other"},
        ],
    )
    def test_odd_content_is_not_believed(self, glm: Path, out: Path, changes: dict[str, Any]) -> None:
        edit_json(glm / "release" / "glmconv.json", lambda manifest: manifest.update(changes))
        assert convert(glm, out).path == out


class TestPlaces:
    def test_tracker_that_names_a_missing_directory(self, root: Path, out: Path) -> None:
        (root / "latest_checkpointed_iteration.txt").write_text("1234")
        refused(root, out, DataError, "its tracker names iter_0001234", "found there: release")

    @pytest.mark.parametrize("text", ["", "latest", "-1", "1" * 40, "../x", "\x00"])
    def test_tracker_that_holds_nonsense(self, root: Path, out: Path, text: str) -> None:
        (root / "latest_checkpointed_iteration.txt").write_text(text)
        refused(root, out, DataError, "latest_checkpointed_iteration.txt", "neither a number nor 'release'")

    def test_no_tracker(self, root: Path, out: Path) -> None:
        (root / "latest_checkpointed_iteration.txt").unlink()
        refused(root, out, StorageError, "release")
        assert convert(root / "release", out).path == out

    def test_file_instead_of_a_directory(self, root: Path, out: Path) -> None:
        refused(root / "release" / ".metadata", out, StorageError, "is not a directory")

    def test_empty_directory(self, tmp_path: Path, out: Path) -> None:
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", out, StorageError, "nor a Megatron torch_dist checkpoint")

    def test_hub_address(self, out: Path) -> None:
        refused(Path("hf://org/name"), out, UsageError, "is not a path on this machine", "hf download")

    def test_inside_of_the_source(self, root: Path) -> None:
        refused(root, root / "release" / "hf" / "out", UsageError, "inside the source")

    def test_destination_that_is_the_source(self, root: Path) -> None:
        target = TargetOptions(to="megatron", dialect="slime", iteration=3)
        refused(root, root, UsageError, "the destination is the source itself", target=target)


class TestHostilePickles:
    """``common.pt`` and ``train_state.pt`` are pickles too; whatever reads them runs none of it."""

    def test_common_state(self, root: Path, out: Path, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        torch.save({"args": Hostile(marker), "iteration": 3}, root / "release" / "common.pt")
        assert convert(root, out).path == out
        assert inspect(root).facts["common iteration"] == "3"
        check(root)
        assert not marker.exists()

    def test_tracker_of_megatron_bridge(self, root: Path, out: Path, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        torch.save({"step": Hostile(marker)}, root / "latest_train_state.pt")
        refused(root, out, DataError, "latest_train_state.pt", "holds no step")
        assert not marker.exists()

    @pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00."])
    def test_tracker_of_megatron_bridge_that_is_none(self, root: Path, out: Path, content: bytes) -> None:
        (root / "latest_train_state.pt").write_bytes(content)
        refused(root, out, DataError, "latest_train_state.pt")

    def test_key_that_cannot_be_one(self, root: Path) -> None:
        """No pickler writes a dictionary with a Namespace as key, since Python could not read it."""
        namespace = b"cargparse\nNamespace\n)\x81}b"
        (root / "release" / "common.pt").write_bytes(saved(b"\x80\x02}" + namespace + b"K\x01s."))
        assert "cannot be read" in inspect(root).facts["common state"]

    @pytest.mark.parametrize("step", [-1, 2**2000, 1.5, "3", None])
    def test_step_that_is_none(self, root: Path, out: Path, step: Any) -> None:
        torch.save({"step": step}, root / "latest_train_state.pt")
        refused(root, out, DataError, "holds no step")


class TestChangesMeanwhile:
    def test_distcp_shrinks(self, root: Path, out: Path) -> None:
        file = distcp(root)
        stop = Meddler(lambda: os.truncate(file, 5000))
        refused(root, out, DataError, file.name, "shrank", stop=stop, meddled=True)

    def test_distcp_is_touched(self, root: Path, out: Path) -> None:
        file = distcp(root)
        stop = Meddler(lambda: os.utime(file), after=2)
        refused(root, out, DataError, file.name, "modification time", stop=stop, meddled=True)
