"""torch and megatron-core read what we write, and we read what they write, byte for byte."""

from __future__ import annotations

import io
import pickle
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from glmconv.basics.dtypes import BY_TORCH_NAME, DType
from glmconv.basics.errors import DataError
from glmconv.formats.torchdist.common import (
    METADATA_JSON,
    common_state,
    read_common,
    read_scalars,
    write_common,
)
from glmconv.formats.torchdist.extra_state import EMPTY_STATE, extra_state_names
from glmconv.formats.torchdist.metadata import (
    Chunk,
    ObjectEntry,
    TensorEntry,
    parse_metadata,
    payload_offsets,
    read_metadata,
)
from glmconv.formats.torchdist.metadata_writing import metadata_bytes
from glmconv.formats.torchdist.record import frame
from glmconv.plan.training_args import args_namespace
from glmconv.source.torchdist.location import locate
from tests.support import mcore_models, mcore_run, torchdist_jobs
from tests.support.torchdist_jobs import bytes_of, sample

SHAPES = [(), (1,), (0,), (3, 0), (2, 3), (300, 700), (2, 3, 4), (2, 3, 1, 5, 2), (70_000,), (1,) * 30]

lanes = pytest.mark.parametrize("lane", mcore_run.LANES)


def require(lane: str) -> None:
    if mcore_run.lane_path(lane) is None:
        pytest.fail(f"megatron-core {lane} is not here: set GLMCONV_MCORE_NEXT, as scripts/test.sh does")


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.fixture
def without_crc() -> Iterator[None]:
    """``torch.save`` with every CRC 0, as our records are."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def values(dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    raw = (torch.arange(count * dtype.itemsize) % 127).to(torch.uint8)
    if dtype is DType.BOOL:
        raw %= 2
    whole = torch.empty(shape, dtype=getattr(torch, dtype.torch_name))
    if count:
        whole.view(-1).view(torch.uint8).copy_(raw)
    return whole


def record(tensor: torch.Tensor) -> bytes:
    dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
    around = frame(dtype, tuple(tensor.shape))
    return around.head + bytes_of(tensor) + around.tail


@pytest.mark.usefixtures("without_crc")
@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_a_record_is_what_torch_saves_without_crc(dtype: DType) -> None:
    for shape in SHAPES:
        tensor = values(dtype, shape)
        assert record(tensor) == saved(tensor), shape


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_torch_loads_a_record_as_weights_only(dtype: DType) -> None:
    for shape in SHAPES:
        tensor = values(dtype, shape)
        loaded = torch.load(io.BytesIO(record(tensor)), weights_only=True)
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(loaded) == bytes_of(tensor)


@pytest.mark.usefixtures("without_crc")
def test_the_empty_extra_state_is_a_saved_list_of_none() -> None:
    assert saved([None]) == EMPTY_STATE
    assert torch.load(io.BytesIO(EMPTY_STATE), weights_only=True) == [None]


@dataclass(slots=True)
class Unit:
    """A checkpoint of ours: records at odd places with gaps, cut as told, many objects in one place."""

    path: Path
    tensors: dict[str, torch.Tensor]
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    family: str = "glm_moe_dsa"

    def write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        files = {f"__0_{i}.distcp": bytearray(EMPTY_STATE if i == 0 else b"") for i in range(3)}
        entries = {}
        gaps = random.Random(7)
        for name, tensor in self.tensors.items():
            cuts = self.cuts.get(name, (1,) * tensor.dim())
            sizes = tuple(size // cut for size, cut in zip(tensor.shape, cuts, strict=True))
            chunks = []
            for at in product(*map(range, cuts)):
                offsets = tuple(i * size for i, size in zip(at, sizes, strict=True))
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                data = record(tensor[box] if box else tensor)
                file = gaps.choice(list(files))
                files[file] += bytes(gaps.randrange(200))
                chunks.append(Chunk(offsets, sizes, file, len(files[file]), len(data)))
                files[file] += data
            dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
            entries[name] = TensorEntry(dtype, tuple(tensor.shape), tuple(chunks))
        place = ObjectEntry("__0_0.distcp", 0, len(EMPTY_STATE))
        for file, content in files.items():
            (self.path / file).write_bytes(content)
        described = metadata_bytes(entries, dict.fromkeys(self.objects, place))
        (self.path / ".metadata").write_bytes(described)
        (self.path / "metadata.json").write_bytes(METADATA_JSON)
        spec = replace(mcore_models.tiny(self.family).spec, dtype="bfloat16")
        state = common_state(args_namespace(spec, padded_vocab_size=spec.vocab_size), per_layer=True)
        (self.path / "common.pt").write_bytes(write_common(state))


EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1"


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    tensors = {f"plain.{dtype}": sample([8, 6], dtype, 3) for dtype in torchdist_jobs.DTYPES}
    tensors |= {
        "vector": sample([32], "float32", 4),
        f"{EXPERTS}.weight": sample([2, 4, 6, 5], "bfloat16", 5),
    }
    cuts = {"plain.bfloat16": (4, 1), "plain.float32": (2, 3), f"{EXPERTS}.weight": (2, 4, 2, 1)}
    objects = extra_state_names({f"{EXPERTS}.weight": (2, 4, 6, 5), "decoder.final_layernorm.weight": (4,)})
    unit = Unit(tmp_path / "iter_0000001", tensors, cuts, tuple(objects))
    unit.write()
    return unit


def test_torch_reads_what_we_write(unit: Unit) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in unit.tensors.items()}
    load(loaded, checkpoint_id=unit.path, no_dist=True)
    for name, tensor in unit.tensors.items():
        assert bytes_of(loaded[name]) == bytes_of(tensor), name


def test_we_read_what_we_write(unit: Unit) -> None:
    assert_holds(unit.path, unit.tensors)


def assert_holds(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Our reader finds exactly these tensors, with these bytes."""
    found = read_metadata(path)
    assert set(found.tensors) == set(tensors)
    offsets = payload_offsets(path, found)
    for name, tensor in tensors.items():
        entry = found.tensors[name]
        assert entry.shape == tuple(tensor.shape)
        assert entry.dtype.torch_name == str(tensor.dtype).removeprefix("torch.")
        whole = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for chunk, offset in zip(entry.chunks, offsets[name], strict=True):
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            part = torch.empty(chunk.sizes, dtype=tensor.dtype)
            size = part.numel() * part.element_size()
            raw = bytearray((path / chunk.file).read_bytes()[offset : offset + size])
            part.view(-1).view(torch.uint8).copy_(torch.frombuffer(raw, dtype=torch.uint8))
            whole[box] = part
        assert bytes_of(whole) == bytes_of(tensor), name


def torch_metadata(unit: Unit) -> metadata.Metadata:
    """The same content as our reader finds, in torch's own classes."""
    found = read_metadata(unit.path)
    described: dict[str, Any] = {}
    stored = {}
    for name, entry in found.tensors.items():
        properties = metadata.TensorProperties(dtype=getattr(torch, entry.dtype.torch_name))
        boxes = [
            metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ]
        described[name] = metadata.TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
        for chunk in entry.chunks:
            index = metadata.MetadataIndex(name, torch.Size(chunk.offsets))
            stored[index] = filesystem._StorageInfo(chunk.file, chunk.offset, chunk.length)
    for name, place in found.objects.items():
        described[name] = metadata.BytesStorageMetadata()
        stored[metadata.MetadataIndex(name)] = filesystem._StorageInfo(place.file, place.offset, place.length)
    return metadata.Metadata(described, None, stored, metadata.StorageMeta(), "1.0.0")


def test_the_metadata_equals_one_of_torchs_own_classes(unit: Unit) -> None:
    ours = pickle.loads((unit.path / ".metadata").read_bytes())
    theirs = torch_metadata(unit)
    assert ours == theirs
    assert vars(ours) == vars(theirs)
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert all(
        type(entry.size) is torch.Size
        for entry in ours.state_dict_metadata.values()
        if hasattr(entry, "size")
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_torchs_own_classes_is_read(unit: Unit, protocol: int) -> None:
    theirs = torch_metadata(unit)
    found = read_metadata(unit.path)
    read = parse_metadata(pickle.dumps(theirs, protocol), "here")
    assert (read.tensors, read.objects) == (found.tensors, found.objects)


def test_what_megatron_adds_to_the_metadata_is_skipped(unit: Unit) -> None:
    theirs = torch_metadata(unit)
    theirs.all_local_plans = [SavePlan(items=[])]  # type: ignore[attr-defined]
    theirs.planner_data = {"a": ("a", 0)}
    assert len(parse_metadata(pickle.dumps(theirs), "here").tensors) == len(unit.tensors)


def test_metadata_of_a_compressed_checkpoint_is_refused(unit: Unit) -> None:
    theirs = torch_metadata(unit)
    index = next(iter(theirs.storage_data))
    theirs.storage_data[index] = replace(theirs.storage_data[index], transform_descriptors=("zstd",))
    with pytest.raises(DataError, match="compressed"):
        parse_metadata(pickle.dumps(theirs), "here")


@pytest.mark.parametrize("threads", [1, 3])
def test_we_read_what_torch_writes(threads: int, tmp_path: Path) -> None:
    tensors = {f"a.{dtype}": sample([8, 6], dtype, 1) for dtype in torchdist_jobs.DTYPES}
    tensors |= {
        "b.view": sample([40, 6], "bfloat16", 3)[4:7],
        "b.columns": sample([8, 6], "float32", 2)[:, 1:3],
    }
    tensors |= {"b.scalar": torch.tensor(3.5), "b.parameter": torch.nn.Parameter(torch.ones(3))}
    writer = FileSystemWriter(tmp_path, thread_count=threads)
    save({"model": tensors, "step": 3}, storage_writer=writer, no_dist=True)
    held = {f"model.{name}": tensor for name, tensor in tensors.items()}
    metadata_ = read_metadata(tmp_path)
    assert set(metadata_.objects) == {"step"}
    assert_holds(tmp_path, held)


def test_a_transposed_tensor_which_torch_stores_by_its_strides_is_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(6, 8).t()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(DataError, match=r"w at \[0, 0\].*strided"):
        payload_offsets(tmp_path, read_metadata(tmp_path))


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_loads_the_common_state(unit: Unit, weights_only: bool) -> None:
    with torch.serialization.safe_globals([Namespace]):  # as megatron-core registers it
        loaded = torch.load(unit.path / "common.pt", weights_only=weights_only)
    ours = read_common(unit.path)
    assert loaded["args"].params_dtype is torch.bfloat16
    assert ours["args"].params_dtype is DType.BF16
    ours["args"].params_dtype = torch.bfloat16
    assert loaded == ours


def test_we_read_a_common_state_of_torch(tmp_path: Path) -> None:
    nested = {
        "t": torch.arange(3),
        "d": torch.float16,
        "n": None,
        "e": {},
        "l": [1, (2, "é")],
        "b": b"\x00\xff",
    }
    torch.save({"args": Namespace(**nested), "big": torch.zeros(5000)}, tmp_path / "common.pt")
    read = read_common(tmp_path)
    assert vars(read["args"])["d"] is DType.F16
    assert read["args"].l == [1, (2, "é")]
    assert read["args"].b == b"\x00\xff"
    assert read["args"].t.data == bytes_of(torch.arange(3))
    assert (read["big"].shape, read["big"].data) == ((5000,), None)


def test_a_root_of_megatron_bridge_is_found(tmp_path: Path) -> None:
    state = {
        "step": torch.tensor(20, dtype=torch.int32),
        "do_train": torch.tensor(True),
        "tokens": torch.tensor(1.5),
    }
    torch.save(state, tmp_path / "latest_train_state.pt")
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "iter_0000020" / ".metadata").touch()
    assert read_scalars(tmp_path / "latest_train_state.pt") == {"step": 20, "do_train": True, "tokens": 1.5}
    assert locate(tmp_path).iteration == 20


@pytest.mark.slow
@lanes
def test_we_read_what_megatron_saves(lane: str, tmp_path: Path) -> None:
    require(lane)
    out = tmp_path / "iter_0000012"
    held = mcore_run.run(torchdist_jobs.save_as_megatron, lane=lane, arguments={"out": str(out)})[0]
    found = read_metadata(out)
    offsets = payload_offsets(out, found)
    assert set(found.tensors) == set(held)
    assert len(found.tensors["cut.rows"].chunks) == 4
    for name, (shape, content) in held.items():
        entry = found.tensors[name]
        assert list(entry.shape) == shape
        whole = bytearray(len(content) // 2)
        for chunk, offset in zip(entry.chunks, offsets[name], strict=True):
            data = (out / chunk.file).read_bytes()
            item = entry.dtype.itemsize
            run = chunk.sizes[-1] * item
            rows = product(*map(range, chunk.sizes[:-1]))
            for number, row in enumerate(rows):
                at = 0
                for index, start, size in zip((*row, 0), chunk.offsets, entry.shape, strict=True):
                    at = at * size + start + index
                whole[at * item : at * item + run] = data[offset + number * run : offset + (number + 1) * run]
        assert whole.hex() == content, name
    assert {f"module._extra_state/shard_{i}_2" for i in range(2)} <= set(found.objects)
    common = read_common(out, found)
    assert common["iteration"] == 12
    assert common["content_metadata"] == {"singleton_local_shards": False}
    assert vars(common["args"]) == {
        "num_layers": 4,
        "params_dtype": DType.BF16,
        "nothing": None,
        "ratio": 0.5,
        "sizes": [1, 2],
    }


@pytest.mark.slow
@lanes
def test_megatron_reads_what_we_write(lane: str, unit: Unit) -> None:
    require(lane)
    shapes = {
        name: [
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            name.startswith("decoder.layers."),
        ]
        for name, tensor in unit.tensors.items()
    }
    asked = [name for name in unit.objects if name.startswith("decoder.layers.")]
    arguments = {"unit": str(unit.path), "shapes": shapes, "objects": asked}
    got = mcore_run.run(torchdist_jobs.load_as_megatron, lane=lane, arguments=arguments)[0]
    assert got["tensors"] == {name: bytes_of(tensor).hex() for name, tensor in unit.tensors.items()}
    assert got["objects"] == dict.fromkeys(asked, "None")
    assert len(asked) == 8
    # What megatron-core calls missing is what the checkpoint has and nobody asked for.
    assert [name for name in (*got["missing"], *got["unexpected"]) if "_extra_state" not in name] == []
    assert got["content"]["non_homogeneous_layers"] is True
    assert got["content"]["singleton_local_shards"] is False
    assert got["num_layers"] == mcore_models.tiny("glm_moe_dsa").spec.num_layers
    assert got["params_dtype"] == "torch.bfloat16"


@pytest.mark.slow
@lanes
def test_a_trainer_makes_its_config_of_the_args(lane: str, tmp_path: Path) -> None:
    require(lane)
    units = {}
    for family in ("qwen3", "qwen3_moe", "glm4_moe", "glm_moe_dsa"):
        Unit(tmp_path / family, {"a": torch.ones(2)}, family=family).write()
        units[family] = str(tmp_path / family)
    arguments = {"units": units}
    configs = mcore_run.run(torchdist_jobs.configs_of_args, lane=lane, arguments=arguments)[0]
    for family, config in configs.items():
        spec = mcore_models.tiny(family).spec
        expected: dict[str, Any] = {
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "ffn_hidden_size": spec.ffn_size,
            "layernorm_epsilon": spec.norm_eps,
            "add_qkv_bias": spec.qkv_bias,
            "gated_linear_unit": True,
            "num_moe_experts": spec.moe.num_experts if spec.moe else None,
            "mtp_num_layers": spec.num_mtp or None,
        }
        if spec.mla is None:
            expected |= {"kv_channels": spec.head_dim, "qk_layernorm": spec.qk_norm}
            expected |= {"num_query_groups": spec.num_groups}
        else:
            expected |= {"kv_lora_rank": spec.mla.kv_lora_rank, "qk_head_dim": spec.mla.qk_nope_head_dim}
            expected |= {"rope_type": "rope"}
        if spec.moe is not None:
            expected |= {
                "moe_router_topk_scaling_factor": spec.moe.scaling,
                "moe_router_topk": spec.moe.top_k,
            }
        if spec.dsa is not None:
            expected |= {"dsa_indexer_topk": spec.dsa.top_k}
        assert {name: config[name] for name in expected} == expected, family


@pytest.mark.slow
@lanes
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "glm_moe_dsa"])
def test_every_object_that_a_model_asks_for_is_written(lane: str, family: str) -> None:
    require(lane)
    asked = mcore_run.run(torchdist_jobs.expected_objects, lane=lane, arguments={"family": family})[0]
    written = extra_state_names({name: tuple(shape) for name, shape in asked["shapes"].items()})
    assert len(asked["objects"]) > 4
    assert set(asked["objects"]) <= set(written)
