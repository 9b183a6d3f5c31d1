"""Broken Hugging Face checkpoints: each refused clearly, with nothing written and nothing touched."""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmconv.basics.errors import DataError, StorageError, UsageError
from glmconv.commands.convert import RunOptions, convert, plan_conversion
from glmconv.formats.safetensors.header import parse_header
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from tests.support.plain import (
    INDEX,
    Meddler,
    Plain,
    Tensor,
    edit_header,
    edit_json,
    header_text,
    plain,
    refused,
    replace_header,
    safetensors,
    shards_of,
    snapshot,
    without_privileges,
)

EXPERT = "model.layers.3.mlp.experts.1"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A sound dense checkpoint in two shards."""
    return plain("qwen3").write(tmp_path / "hf")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def first(header: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """The entry of a header's tensor, counted in the order of data."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    found: dict[str, Any] = sorted(entries, key=lambda entry: int(entry["data_offsets"][0]))[number]
    return found


class TestFiles:
    """What is wrong with single files."""

    def test_sound_checkpoint_converts(self, hf: Path, out: Path) -> None:
        before = snapshot(hf)
        assert convert(hf, out).path == out / "release"
        assert snapshot(hf) == before

    def test_truncated_shard(self, hf: Path, out: Path) -> None:
        shard = shards_of(hf)[1]
        os.truncate(shard, shard.stat().st_size - 100)
        refused(hf, out, DataError, shard.name, "truncated", "download or copy it again")

    def test_shard_with_bytes_behind_its_data(self, hf: Path, out: Path) -> None:
        with shards_of(hf)[0].open("ab") as stream:
            stream.write(b"x" * 12)
        refused(hf, out, DataError, shards_of(hf)[0].name, "12 bytes at the end belong to no tensor")

    def test_header_larger_than_the_file(self, hf: Path, out: Path) -> None:
        shard = shards_of(hf)[0]
        content = shard.read_bytes()
        shard.write_bytes((len(content) + 1).to_bytes(8, "little") + content[8:])
        refused(hf, out, DataError, shard.name, "not a whole safetensors file", f"{len(content) + 1:,}")

    def test_header_of_exabytes_takes_no_memory(self, hf: Path, out: Path) -> None:
        shard = shards_of(hf)[0]
        shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])
        refused(hf, out, DataError, shard.name, "not a whole safetensors file")

    @pytest.mark.parametrize("content", [b"", b"abc", b"\0" * 8])
    def test_file_too_short_for_a_header(self, hf: Path, out: Path, content: bytes) -> None:
        shards_of(hf)[0].write_bytes(content)
        refused(hf, out, DataError, shards_of(hf)[0].name)

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            (b"{", "not JSON"),
            (b"[]", "not a JSON object"),
            (b"\xff\xfe", "not JSON"),
            (b"[" * 9999, "not JSON"),
        ],
    )
    def test_header_that_is_no_json_object(self, hf: Path, out: Path, text: bytes, word: str) -> None:
        replace_header(shards_of(hf)[0], text)
        refused(hf, out, DataError, shards_of(hf)[0].name, word)

    def test_overlapping_offsets(self, hf: Path, out: Path) -> None:
        def overlap(header: dict[str, Any]) -> None:
            begin, end = first(header, 1)["data_offsets"]
            first(header, 1)["data_offsets"] = [begin - 16, end - 16]

        edit_header(shards_of(hf)[0], overlap)
        refused(hf, out, DataError, "overlaps the tensor before it by 16 bytes", shards_of(hf)[0].name)

    def test_offsets_behind_the_end_of_the_file(self, hf: Path, out: Path) -> None:
        def move(header: dict[str, Any]) -> None:
            begin, end = first(header, -1)["data_offsets"]
            first(header, -1)["data_offsets"] = [begin + (1 << 40), end + (1 << 40)]

        edit_header(shards_of(hf)[0], move)
        refused(hf, out, DataError, "truncated", "belong to no tensor", shards_of(hf)[0].name)

    def test_offsets_that_do_not_fit_the_shape(self, hf: Path, out: Path) -> None:
        edit_header(shards_of(hf)[0], lambda header: first(header)["shape"].append(2))
        refused(hf, out, DataError, "needs", "bytes, data_offsets give")

    @pytest.mark.parametrize(
        ("field", "value", "word"),
        [
            ("dtype", "BF17", "unknown dtype 'BF17'"),
            ("dtype", ["BF16"], "unknown dtype"),
            ("shape", [-1, 4], "bad shape"),
            ("shape", [True, 4], "bad shape"),
            ("shape", [1.0], "bad shape"),
            ("shape", [1 << 61] * 100_000, "bad shape"),
            ("data_offsets", [0], "data_offsets"),
            ("data_offsets", [10, 0], "data_offsets"),
            ("data_offsets", ["0", "8"], "data_offsets"),
        ],
    )
    def test_odd_fields_of_an_entry(self, hf: Path, out: Path, field: str, value: Any, word: str) -> None:
        edit_header(shards_of(hf)[0], lambda header: first(header).update({field: value}))
        message = refused(hf, out, DataError, word, shards_of(hf)[0].name)
        assert len(message) < 3000

    @pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
    def test_entry_without_a_field(self, hf: Path, out: Path, field: str) -> None:
        edit_header(shards_of(hf)[0], lambda header: first(header).pop(field))
        refused(hf, out, DataError, "entry lacks dtype, shape or data_offsets")

    def test_name_twice_in_one_header(self, hf: Path, out: Path) -> None:
        shard = shards_of(hf)[0]
        text = header_text(shard)
        entry = json.dumps(json.loads(text)[EMBEDDING])
        replace_header(shard, f'{{"{EMBEDDING}": {entry}, {text.strip()[1:]}'.encode())
        refused(hf, out, DataError, "named twice in one header", EMBEDDING)

    def test_name_in_two_files(self, hf: Path, out: Path) -> None:
        extra = plain("qwen3").tensors[EMBEDDING]
        (hf / "model-00003-of-00003.safetensors").write_bytes(safetensors({EMBEDDING: extra, "other": extra}))
        edit_json(
            hf / INDEX, lambda index: index["weight_map"].update(other="model-00003-of-00003.safetensors")
        )
        refused(hf, out, DataError, EMBEDDING, "is in two files")

    def test_shard_that_is_a_directory(self, hf: Path, out: Path) -> None:
        shards_of(hf)[0].unlink()
        (hf / "model-00001-of-00002.safetensors").mkdir()
        refused(hf, out, DataError, "model-00001-of-00002.safetensors", "does not exist")

    def test_shard_that_is_a_pipe_is_not_waited_for(self, hf: Path, out: Path) -> None:
        shards_of(hf)[0].unlink()
        os.mkfifo(hf / "model-00001-of-00002.safetensors")
        refused(hf, out, DataError, "model-00001-of-00002.safetensors")

    def test_shard_that_may_not_be_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            hf, out = plain("qwen3").write(Path(folder) / "hf"), Path(folder) / "out"
            shards_of(hf)[0].chmod(0)
            refusal = pytest.raises(StorageError, match=f"{shards_of(hf)[0].name}.*Permission denied")
            with without_privileges(), refusal:
                convert(hf, out)
            assert os.listdir(folder) == ["hf"]

    def test_links_into_a_cache_are_followed(self, hf: Path, out: Path) -> None:
        """The hub's cache keeps files as links to blobs."""
        blobs = hf.parent / "blobs"
        blobs.mkdir()
        for shard in shards_of(hf):
            shard.rename(blobs / f"{shard.stem}-blob")
            shard.symlink_to(blobs / f"{shard.stem}-blob")
        assert convert(hf, out).path.is_dir()

    def test_dangling_link(self, hf: Path, out: Path) -> None:
        shards_of(hf)[1].unlink()
        (hf / "model-00002-of-00002.safetensors").symlink_to("/nowhere")
        refused(hf, out, DataError, "model-00002-of-00002.safetensors", "does not exist")


class TestIndex:
    """The index against the files, both ways."""

    @pytest.mark.parametrize(
        "name",
        [
            "../hf/model-00001-of-00002.safetensors",
            "sub/../../x.safetensors",
            "/etc/passwd",
            "./model-00001-of-00002.safetensors",
            "sub//x.safetensors",
            "",
            ".",
            "x\0y.safetensors",
            "\ud800.safetensors",
            "a" * 300 + ".safetensors",
        ],
    )
    def test_path_that_is_not_plain(self, hf: Path, out: Path, name: str) -> None:
        edit_json(hf / INDEX, lambda index: index["weight_map"].update({EMBEDDING: name}))
        refused(hf, out, DataError, INDEX, "not a plain file name inside the directory")

    def test_file_that_is_missing(self, hf: Path, out: Path) -> None:
        shards_of(hf)[1].unlink()
        refused(hf, out, DataError, "model-00002-of-00002.safetensors", "named by the index, does not exist")

    def test_tensor_that_no_file_has(self, hf: Path, out: Path) -> None:
        file = shards_of(hf)[0].name
        edit_json(hf / INDEX, lambda index: index["weight_map"].update({"model.ghost.weight": file}))
        refused(hf, out, DataError, "model.ghost.weight", f"{file} does not hold it")

    def test_tensor_that_the_index_lacks(self, hf: Path, out: Path) -> None:
        edit_json(hf / INDEX, lambda index: index["weight_map"].pop(EMBEDDING))
        refused(hf, out, DataError, EMBEDDING, "in the file but not in the index", "rebuild the index")

    def test_tensor_in_another_file(self, hf: Path, out: Path) -> None:
        one, two = (shard.name for shard in shards_of(hf))
        edit_json(hf / INDEX, lambda index: index["weight_map"].update({EMBEDDING: two}))
        refused(hf, out, DataError, EMBEDDING, f"the index says {two}, the tensor is in {one}")

    def test_all_faults_are_listed_at_once(self, hf: Path, out: Path) -> None:
        shards_of(hf)[1].unlink()
        edit_json(hf / INDEX, lambda index: index["weight_map"].pop(EMBEDDING))
        refused(hf, out, DataError, EMBEDDING, "model-00002-of-00002.safetensors")

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("nonsense", "not JSON"),
            ("[]", "not a JSON object"),
            ("{}", "weight_map"),
            ('{"weight_map": []}', "weight_map"),
            ('{"weight_map": {"a": 1}}', "weight_map"),
            ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
        ],
    )
    def test_index_that_is_none(self, hf: Path, out: Path, text: str, word: str) -> None:
        (hf / INDEX).write_text(text)
        refused(hf, out, DataError, INDEX, word)

    def test_neither_index_nor_single_file(self, hf: Path, out: Path) -> None:
        (hf / INDEX).unlink()
        refused(hf, out, DataError, "neither model.safetensors.index.json nor model.safetensors is there")


def broken(model: str, tmp_path: Path, change: Callable[[Plain], object], **options: Any) -> Path:
    made = plain(model, **options)
    change(made)
    return made.write(tmp_path / "hf")


def exchange_axes(made: Plain, name: str) -> None:
    """Store a matrix transposed (its shape; the bytes do not matter)."""
    tensor = made.tensors[name]
    made.tensors[name] = Tensor(tensor.dtype, (*tensor.shape[:-2], *tensor.shape[-2:][::-1]), tensor.data)


class TestTensors:
    """The tensors against what the config asks for."""

    def test_missing_tensor(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.tensors.pop("model.norm.weight"))
        message = refused(hf, out, DataError, "model.norm.weight", "missing", "find the files")
        assert "--fill-missing-from" not in message

    def test_missing_expert(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-5.2", tmp_path, lambda made: made.tensors.pop(f"{EXPERT}.up_proj.weight"))
        refused(hf, out, DataError, f"{EXPERT}.up_proj.weight", "missing")

    def test_last_expert_missing_in_one_layer(self, tmp_path: Path, out: Path) -> None:
        prefix = "model.layers.3.mlp.experts.5."

        def drop(made: Plain) -> None:
            for name in [name for name in made.tensors if name.startswith(prefix)]:
                del made.tensors[name]

        refused(broken("glm-5.2", tmp_path, drop), out, DataError, f"{prefix}gate_proj.weight", "missing")

    def test_extra_expert(self, tmp_path: Path, out: Path) -> None:
        name = "model.layers.3.mlp.experts.6.gate_proj.weight"
        hf = broken("glm-5.2", tmp_path, lambda made: made.add(name, (40, 64)))
        refused(hf, out, DataError, name, "belongs to no rule")

    @pytest.mark.parametrize("stacked", [False, True])
    def test_number_of_experts_that_contradicts_the_files(
        self, tmp_path: Path, out: Path, stacked: bool
    ) -> None:
        hf = broken("glm-5.2", tmp_path, lambda made: made.config.update(n_routed_experts=8), stacked=stacked)
        refused(hf, out, DataError, "n_routed_experts", "says 8 experts, the files hold 6 a layer")

    def test_unknown_tensor(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.add("model.layers.0.extra.weight", (3,)))
        refused(hf, out, DataError, "model.layers.0.extra.weight", "BF16[3] belongs to no rule")

    def test_wrong_shape(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.add("model.norm.weight", (65,)))
        refused(hf, out, DataError, "model.norm.weight", "has shape [65]", "asks for [64]")

    def test_expert_stored_transposed(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-5.2", tmp_path, lambda made: exchange_axes(made, f"{EXPERT}.down_proj.weight"))
        refused(hf, out, DataError, f"{EXPERT}.down_proj.weight", "stored transposed")

    def test_square_experts_stored_transposed(self, tmp_path: Path, out: Path) -> None:
        """With I = H each expert's matrices are square; the stack of gate and up still tells."""
        name = "model.layers.3.mlp.experts.gate_up_proj"
        made = plain("glm-5.2", stacked=True, moe_intermediate_size=64)
        assert made.tensors[name].shape == (6, 128, 64)
        exchange_axes(made, name)
        refused(made.write(tmp_path / "hf"), out, DataError, name, "[6, 64, 128]", "stored transposed")

    def test_layer_with_experts_stacked_and_not(self, tmp_path: Path, out: Path) -> None:
        hf = broken(
            "glm-5.2",
            tmp_path,
            lambda made: made.add("model.layers.3.mlp.experts.gate_up_proj", (6, 80, 64)),
        )
        refused(hf, out, DataError, "model.layers.3.mlp.experts.gate_up_proj", "belongs to no rule")

    def test_dtypes_that_do_not_go_into_one_tensor(self, tmp_path: Path, out: Path) -> None:
        name = "model.layers.0.self_attn.k_proj.weight"
        hf = broken("qwen3", tmp_path, lambda made: made.add(name, (48, 64), "F32"))
        refused(hf, out, DataError, "different dtypes: BF16, F32", "--dtype")
        target = TargetOptions(to="megatron", dtype="bfloat16")
        assert convert(hf, out, target=target).path.is_dir()

    def test_cast_that_overflows(self, tmp_path: Path, out: Path) -> None:
        hf = broken(
            "qwen3",
            tmp_path,
            lambda made: made.tensors.update({"model.norm.weight": Tensor("BF16", (64,), b"\x7f\x7f" * 64)}),
        )
        target = TargetOptions(to="megatron", dtype="float16")
        refused(
            hf, out, DataError, "decoder.final_layernorm.weight", "64 values do not fit F16", target=target
        )

    def test_fewer_layers_promised_than_there_are(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.config.update(num_hidden_layers=3))
        refused(hf, out, DataError, "model.layers.3", "the files hold layer 3, config.json promises 3 layers")

    def test_more_layers_promised_than_there_are(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.config.update(num_hidden_layers=5))
        refused(hf, out, DataError, "missing", "model.layers.4.")

    def test_stray_tensors_are_reported_with_the_missing_ones(self, tmp_path: Path, out: Path) -> None:
        def rename(made: Plain) -> None:
            made.tensors["model.norm.wait"] = made.tensors.pop("model.norm.weight")

        hf = broken("qwen3", tmp_path, rename)
        refused(hf, out, DataError, "model.norm.wait", "model.norm.weight", "(missing, unexpected)")


class TestIndexers:
    SHARED, OWN = "model.layers.2.self_attn.indexer", "model.layers.4.self_attn.indexer"

    def test_indexer_on_a_sharing_layer_is_dropped_with_a_warning(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-5.2", tmp_path, lambda made: made.add(f"{self.SHARED}.wk.weight", (16, 64)))
        report = convert(hf, out)
        assert [name for name, _, _ in report.dropped] == [f"{self.SHARED}.wk.weight"]
        assert "shares the index" in str(report.warnings[0])
        assert json.loads((report.path / "glmconv.json").read_text())["dropped"][0]["bytes"] == 16 * 64 * 2

    def test_indexer_missing_on_a_computing_layer(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-5.2", tmp_path, lambda made: made.tensors.pop(f"{self.OWN}.wk.weight"))
        refused(hf, out, DataError, f"{self.OWN}.wk.weight", "missing")


class TestQuantised:
    @pytest.mark.parametrize(
        ("field", "block", "word"),
        [
            ("quantization_config", {"quant_method": "fp8", "fmt": "e4m3"}, "quantised (fp8 e4m3)"),
            (
                "quantization_config",
                {"quant_method": "compressed-tensors", "format": "pack-quantized"},
                "pack-q",
            ),
            ("quantization_config", {"quant_method": "awq"}, "quantised (awq)"),
            ("compression_config", {"format": "int-quantized"}, "int-quantized"),
            ("quantization_config", {}, "quantised"),
            ("quantization_config", "fp8", "quantised"),
        ],
    )
    def test_by_the_config(self, tmp_path: Path, out: Path, field: str, block: Any, word: str) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.config.update({field: block}))
        refused(hf, out, DataError, word, "config.json", "BF16 release")

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "U8"])
    def test_by_a_dtype_though_the_config_is_silent(self, tmp_path: Path, out: Path, dtype: str) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.add("model.norm.weight", (64,), dtype))
        refused(hf, out, DataError, "quantised or not floating point", "model.norm.weight", "BF16 release")

    def test_by_scales_though_the_config_is_silent(self, tmp_path: Path, out: Path) -> None:
        name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
        hf = broken("qwen3", tmp_path, lambda made: made.add(name, (1, 1), "F32"))
        refused(hf, out, DataError, name, "quantised")


class TestCopies:
    """Duplicates that releases keep must be what they say they are."""

    COPY = "model.layers.4.embed_tokens.weight"

    def test_equal_copies_are_dropped(self, tmp_path: Path, out: Path) -> None:
        report = convert(broken("glm-4.5", tmp_path, lambda made: None, copies=True), out)
        assert {name for name, _, _ in report.dropped} >= {self.COPY}

    @pytest.mark.parametrize("workers", [1, 2])
    def test_copy_with_other_bytes(self, tmp_path: Path, out: Path, workers: int) -> None:
        hf = broken("glm-4.5", tmp_path, lambda made: made.add(self.COPY, (384, 64)), copies=True)
        run = RunOptions(workers=workers)
        refused(hf, out, DataError, self.COPY, EMBEDDING, "should be equal, but byte", run=run)

    def test_copy_that_differs_in_its_last_byte(self, tmp_path: Path, out: Path) -> None:
        def flip(made: Plain) -> None:
            tensor = made.tensors[EMBEDDING]
            data = tensor.data[:-1] + bytes([tensor.data[-1] ^ 1])
            made.tensors[self.COPY] = Tensor(tensor.dtype, tensor.shape, data)

        hf = broken("glm-4.5", tmp_path, flip, copies=True)
        refused(hf, out, DataError, f"byte {384 * 64 * 2 - 1} of {384 * 64 * 2} differs")

    def test_copy_of_another_shape(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-4.5", tmp_path, lambda made: made.add(self.COPY, (64, 384)), copies=True)
        refused(hf, out, DataError, self.COPY, f"does not have the shape and dtype of {EMBEDDING}")

    def test_tied_head_with_other_bytes(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.add("lm_head.weight", (384, 64)))
        refused(hf, out, DataError, "lm_head.weight", EMBEDDING, "should be equal")

    def test_the_repaired_source_converts_without_more_ado(self, tmp_path: Path, out: Path) -> None:
        hf = broken("qwen3", tmp_path, lambda made: made.add("lm_head.weight", (384, 64)))
        refused(hf, out, DataError, "should be equal")
        shutil.rmtree(hf)
        broken("qwen3", tmp_path, lambda made: None, copies=True)
        assert convert(hf, out).path.is_dir()


class TestMtp:
    @pytest.mark.parametrize("model", ["glm-5", "glm-5.2", "glm-4.5"])
    def test_promised_but_not_there(self, tmp_path: Path, out: Path, model: str) -> None:
        def drop(made: Plain) -> None:
            last = f"model.layers.{made.config['num_hidden_layers']}."
            for name in [name for name in made.tensors if name.startswith(last)]:
                del made.tensors[name]

        hf = broken(model, tmp_path, drop)
        refused(hf, out, DataError, "promises 1 MTP layer(s), the checkpoint lacks them", "--drop-mtp")
        assert convert(hf, out, source=SourceOptions(drop_mtp=True)).path.is_dir()

    @pytest.mark.parametrize("model", ["glm-5", "glm-5.2", "glm-4.5"])
    def test_there_but_denied(self, tmp_path: Path, out: Path, model: str) -> None:
        hf = broken(model, tmp_path, lambda made: made.config.update(num_nextn_predict_layers=0))
        layer = plain(model).config["num_hidden_layers"]
        said = f"config.json promises {layer} layers and 0 MTP layers (num_nextn_predict_layers)"
        refused(hf, out, DataError, f"model.layers.{layer}: the files hold layer {layer}", said)

    def test_counted_where_the_config_is_silent(self, tmp_path: Path, out: Path) -> None:
        hf = broken("glm-5", tmp_path, lambda made: made.config.pop("num_nextn_predict_layers"))
        assert plan_conversion(hf).source.spec.num_mtp == 1


class TestPlaces:
    def test_missing_path(self, tmp_path: Path, out: Path) -> None:
        refused(tmp_path / "nowhere", out, StorageError, "nowhere", "No such file or directory")

    def test_file_instead_of_a_directory(self, hf: Path, out: Path) -> None:
        refused(shards_of(hf)[0], out, StorageError, "is not a directory", "pass a checkpoint's directory")

    def test_empty_directory(self, tmp_path: Path, out: Path) -> None:
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", out, StorageError, "holds neither Hugging Face files")

    def test_weights_without_a_config(self, hf: Path, out: Path) -> None:
        (hf / "config.json").unlink()
        refused(hf, out, StorageError, "config.json", "cannot read")

    @pytest.mark.parametrize("address", ["hf://zai-org/GLM-5.2", "https://x.y/z", "s3://bucket/x"])
    def test_address_that_is_no_path(self, out: Path, address: str) -> None:
        refused(Path(address), out, UsageError, "is not a path on this machine", "hf download")

    @pytest.mark.parametrize("name", ["a" * 300, "nul\0byte"])
    def test_path_that_no_filesystem_takes(self, tmp_path: Path, out: Path, name: str) -> None:
        refused(tmp_path / name, out, StorageError, "cannot open it")

    def test_both_layouts_in_one_directory(self, hf: Path, out: Path) -> None:
        (hf / ".metadata").write_bytes(b"x")
        refused(hf, out, DataError, "holds both a Megatron checkpoint and")


class TestOddSideFiles:
    def test_names_that_are_not_unicode_survive_both_ways(self, hf: Path, tmp_path: Path) -> None:
        odd = Path(os.fsdecode(os.fsencode(hf) + b"/README-caf\xe9.md"))
        odd.write_bytes(b"text")
        convert(hf, tmp_path / "megatron")
        convert(tmp_path / "megatron", tmp_path / "back")
        assert (
            Path(os.fsdecode(os.fsencode(tmp_path / "back") + b"/README-caf\xe9.md")).read_bytes() == b"text"
        )

    def test_directory_that_has_the_name_of_the_manifest(self, hf: Path, out: Path) -> None:
        (hf / "glmconv.json").mkdir()
        (hf / "glmconv.json" / "README.md").write_text("text")
        words = ("glmconv.json/README.md", "rename the directory")
        refused(hf, out, DataError, *words, target=TargetOptions(to="hf"))

    def test_config_that_is_a_pipe_is_not_waited_for(self, hf: Path, out: Path) -> None:
        (hf / "config.json").unlink()
        os.mkfifo(hf / "config.json")
        refused(hf, out, DataError, "config.json", "not a regular file")


class TestChangesMeanwhile:
    """Somebody writes to the source while it is read."""

    def last(self, hf: Path) -> Path:
        return shards_of(hf)[-1]

    def test_shrinks(self, hf: Path, out: Path) -> None:
        shard = self.last(hf)
        size = shard.stat().st_size
        stop = Meddler(lambda: os.truncate(shard, size - 4096))
        refused(hf, out, DataError, shard.name, "shrank", "let nothing write", stop=stop, meddled=True)

    def test_grows(self, hf: Path, out: Path) -> None:
        shard = self.last(hf)
        stop = Meddler(lambda: os.truncate(shard, shard.stat().st_size + 1))
        refused(hf, out, DataError, shard.name, "grew", stop=stop, meddled=True)

    def test_changes_in_place(self, hf: Path, out: Path) -> None:
        shard = self.last(hf)

        def overwrite() -> None:
            with shard.open("r+b") as stream:
                stream.seek(-10, os.SEEK_END)
                stream.write(b"x" * 10)

        stop = Meddler(overwrite, after=3)
        refused(hf, out, DataError, shard.name, "modification time differs", stop=stop, meddled=True)

    def test_is_replaced(self, hf: Path, out: Path) -> None:
        shard = self.last(hf)

        def replace() -> None:
            shutil.copy(shard, hf / "new")
            (hf / "new").rename(shard)

        refused(hf, out, DataError, shard.name, "modification time", stop=Meddler(replace), meddled=True)

    def test_is_removed(self, hf: Path, out: Path) -> None:
        shard = self.last(hf)
        stop = Meddler(shard.unlink)
        refused(hf, out, StorageError, shard.name, "No such file", stop=stop, meddled=True, litter=True)

    def test_a_side_file_changes(self, hf: Path, out: Path) -> None:
        stop = Meddler(lambda: os.truncate(hf / "LICENSE", 100))
        refused(hf, out, DataError, "LICENSE", "grew", stop=stop, meddled=True)

    def test_once_it_is_quiet_the_same_command_converts(self, hf: Path, out: Path) -> None:
        stop = Meddler(lambda: os.utime(self.last(hf)))
        refused(hf, out, DataError, "modification time", stop=stop, meddled=True)
        assert convert(hf, out).path.is_dir()


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
    "c": {"dtype": "F8_E4M3", "shape": [0, 9], "data_offsets": [28, 28]},
    "d": {"dtype": "I64", "shape": [2], "data_offsets": [28, 44]},
}
DATA = 44
SCALARS = st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=4)
TREES = st.recursive(
    SCALARS | st.sampled_from(["F32", "BF16", "shape", "dtype"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_lowercase, max_size=2), inner)
    ),
    max_leaves=12,
)


def judge(text: bytes, size: int) -> None:
    """A header is refused with a DataError, or its tensors tile the data without gap or overlap."""
    try:
        header = parse_header(text, 8 + len(text) + size, "file")
    except DataError:
        return
    at = 0
    for entry in sorted(header.entries, key=lambda entry: (entry.begin, entry.end)):
        assert entry.begin == at
        at = entry.end
    assert at == size
    assert len({entry.name for entry in header.entries}) == len(header.entries)


class TestMutatedHeaders:
    @given(st.data())
    def test_any_node_replaced(self, data: st.DataObject) -> None:
        header: dict[str, Any] = json.loads(json.dumps(HEADER))
        holder: Any = header
        while True:
            key = data.draw(
                st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
            )
            inner = holder[key]
            if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
                break
            holder = inner
        holder[key] = data.draw(TREES)
        judge(json.dumps(header).encode(), data.draw(st.sampled_from([0, DATA - 1, DATA, DATA + 1])))

    @given(TREES)
    def test_any_tree(self, tree: Any) -> None:
        judge(json.dumps(tree).encode(), DATA)

    @given(st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6))
    def test_any_bytes_replaced(self, at: int, piece: bytes, length: int) -> None:
        text = json.dumps(HEADER).encode()
        judge(text[:at] + piece + text[at + length :], DATA)

    @given(st.lists(st.tuples(st.integers(0, DATA), st.integers(0, 6)), max_size=6))
    @settings(max_examples=300)
    def test_any_layout_of_ranges(self, ranges: list[tuple[int, int]]) -> None:
        header = {
            f"t{i}": {"dtype": "U8", "shape": [length], "data_offsets": [start, start + length]}
            for i, (start, length) in enumerate(ranges)
        }
        judge(json.dumps(header).encode(), max((start + length for start, length in ranges), default=0))
