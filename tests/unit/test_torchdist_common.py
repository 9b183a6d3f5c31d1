"""The state beside the tensors: written for every trainer, read without running anything."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.formats.torchdist.common import (
    METADATA_JSON,
    Opaque,
    StoredValue,
    common_state,
    read_archive,
    read_common,
    read_scalars,
    write_common,
)
from glmconv.formats.torchdist.entries import Metadata, ObjectEntry
from glmconv.plan.training_args import args_namespace
from glmconv.tables.spec import Dsa, Mla, ModelSpec, Moe, Rope

DENSE = ModelSpec(
    model_type="dense",
    num_layers=4,
    hidden_size=64,
    num_heads=8,
    num_groups=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=1000,
    norm_eps=1e-6,
    tied=True,
    rope=Rope(theta=1_000_000.0, partial_factor=0.5),
    max_positions=4096,
)
MOE = Moe(8, 32, 2, shared_ffn_size=32, router_bias=True, score_function="sigmoid", scaling=2.5)
SPARSE = replace(
    DENSE,
    tied=False,
    num_groups=8,
    mla=Mla(32, 16, 24, 8, 16),
    moe=MOE,
    moe_layers=(False, True, True, True),
    dsa=Dsa(4, 16, 8, (True, False, True, False), 2, 1, True),
    num_mtp=1,
)


def archived(data_pkl: bytes, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("common/data.pkl", data_pkl)
        for name, data in members.items():
            archive.writestr(f"common/{name.replace('_', '/')}", data)
    return out.getvalue()


def saved(path: Path, state: Any) -> Path:
    path.joinpath("common.pt").write_bytes(archived(pickle.dumps(state, 2)))
    return path


@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_what_is_written_is_read_back(spec: ModelSpec, tmp_path: Path) -> None:
    state = common_state(args_namespace(spec, padded_vocab_size=1024), iteration=7, per_layer=True)
    tmp_path.joinpath("common.pt").write_bytes(write_common(state))
    read = read_common(tmp_path)
    assert read == state
    assert read["args"].params_dtype is DType.BF16


def test_the_state_says_what_loaders_look_for() -> None:
    state = common_state(Namespace(), iteration=3)
    assert state["checkpoint_version"] == 3.0
    assert state["iteration"] == 3
    assert state["content_metadata"] == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    assert state["num_floating_point_operations_so_far"] == 0
    per_layer = common_state(Namespace(), per_layer=True)["content_metadata"]
    assert per_layer["non_homogeneous_layers"] is True


def test_metadata_json_names_the_backend() -> None:
    assert b'"sharded_backend": "torch_dist"' in METADATA_JSON


def test_args_of_a_dense_model() -> None:
    args = args_namespace(DENSE, padded_vocab_size=1024)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (4, 64, 8)
    assert (args.num_query_groups, args.group_query_attention, args.kv_channels) == (2, True, 16)
    assert (args.padded_vocab_size, args.vocab_size) == (1024, 1000)
    assert args.untie_embeddings_and_output_weights is False
    assert (args.rotary_base, args.rotary_percent, args.rotary_interleaved) == (1_000_000, 0.5, False)
    assert (args.num_experts, args.multi_latent_attention, args.mtp_num_layers) == (None, False, None)
    assert (args.no_save_optim, args.no_save_rng) == (True, True)


def test_args_of_a_sparse_mixture_with_latent_attention() -> None:
    args = args_namespace(SPARSE, padded_vocab_size=1000)
    assert args.moe_layer_freq == [0, 1, 1, 1]
    assert (args.num_experts, args.moe_ffn_hidden_size, args.moe_router_topk) == (8, 32, 2)
    assert args.moe_router_topk_scaling_factor == 2.5
    assert (args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim) == (24, 8, 16)
    assert (args.q_lora_rank, args.kv_lora_rank, args.rope_type) == (32, 16, "rope")
    assert (args.dsa_indexer_topk, args.dsa_indexer_topk_freq) == (8, 2)
    assert args.add_position_embedding is False
    assert args.mtp_num_layers == 1


def test_a_pattern_of_layers_is_a_list_where_layers_are_stored_one_by_one() -> None:
    every = replace(SPARSE, moe_layers=(True,) * 4)
    assert args_namespace(every, padded_vocab_size=1000).moe_layer_freq == 1
    assert args_namespace(every, padded_vocab_size=1000, per_layer=True).moe_layer_freq == [1, 1, 1, 1]


def test_yarn_scaling_is_passed_on() -> None:
    rope = Rope(10_000.0, scaling={"rope_type": "yarn", "factor": 40, "mscale": 1.0, "beta_fast": 32})
    args = args_namespace(replace(SPARSE, rope=rope), padded_vocab_size=1000)
    assert (args.rope_type, args.rotary_scaling_factor, args.mscale, args.beta_fast) == ("yarn", 40, 1.0, 32)


class Foreign:
    def __init__(self) -> None:
        self.secret = 1


class Enumerated:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Foreign, (5,))


def test_objects_of_other_classes_stay_descriptions(tmp_path: Path) -> None:
    args = Namespace(backend=Enumerated(), object=Foreign(), plain=(1, [2, {"x": None}]))
    read = read_common(saved(tmp_path, {"args": args}))
    assert isinstance(read["args"], Namespace)
    backend = read["args"].backend
    assert isinstance(backend, Opaque)
    assert (backend.path.rpartition(".")[2], backend.args) == ("Foreign", (5,))
    assert isinstance(read["args"].object, Opaque)
    assert read["args"].plain == (1, [2, {"x": None}])


@pytest.mark.parametrize("reduced", [(os.system, ("true",)), (eval, ("1",)), (getattr, (1, "real"))])
def test_calls_stay_descriptions_and_are_never_made(
    reduced: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return reduced

    saved(tmp_path, {"iteration": Call()})
    called: list[str] = []
    monkeypatch.setattr(os, "system", called.append)
    read = read_common(tmp_path)
    assert isinstance(read["iteration"], Opaque)
    assert not called


def test_a_namespace_cannot_take_over_itself(tmp_path: Path) -> None:
    hostile = Namespace()
    vars(hostile).update({"self": 1, "__class__": 2, "__init__": 3, "a": 4})
    args = read_common(saved(tmp_path, {"args": hostile}))["args"]
    assert type(args) is Namespace
    assert args.a == 4


def tensor(storage: bytes, numel: int, shape: bytes, strides: bytes) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
        + storage
        + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK"
        + bytes([numel])
        + b"tQK\x00"
        + shape
        + strides
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def test_tensors_become_values_and_small_ones_keep_their_data(tmp_path: Path) -> None:
    step = tensor(b"LongStorage", 1, b")", b")")
    data = archived(b"\x80\x02}X\x04\x00\x00\x00step" + step + b"s.", data_0=(1234).to_bytes(8, "little"))
    path = tmp_path / "train_state.pt"
    path.write_bytes(data)
    value = read_archive(path)["step"]
    assert value == StoredValue(DType.I64, (), (1234).to_bytes(8, "little"))
    assert value.scalar() == 1234
    assert read_scalars(path) == {"step": 1234}


def test_a_tensor_without_its_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(archived(b"\x80\x02" + tensor(b"LongStorage", 1, b")", b")") + b"."))
    with pytest.raises(DataError, match="no member 'data/0'"):
        read_archive(path)


def test_the_common_state_may_be_an_object_in_a_record_file(tmp_path: Path) -> None:
    state = common_state(Namespace(a=1), iteration=5)
    inner = archived(pickle.dumps([{"iteration": 5}], 2))
    tmp_path.joinpath("__0_0.distcp").write_bytes(b"x" * 100 + inner + b"y" * 50)
    metadata = Metadata({}, {"common_state/shard_0_1": ObjectEntry("__0_0.distcp", 100, len(inner))})
    assert read_common(tmp_path, metadata) == {"iteration": 5}
    tmp_path.joinpath("common.pt").write_bytes(write_common(state))
    assert read_common(tmp_path, metadata) == state


@pytest.mark.parametrize("state", [[1], "text", None])
def test_a_state_that_is_no_dictionary_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dictionary"):
        read_common(saved(tmp_path, state))


def test_a_checkpoint_without_common_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither common\.pt nor"):
        read_common(tmp_path, Metadata({}, {}))


_DOUBLING = b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(40))


@pytest.mark.parametrize(
    "value",
    [b"]" * 500 + b"a" * 499, b")" + b"\x85" * 500, b"]q\x002a", _DOUBLING],
    ids=["lists", "tuples", "cycle", "doubling"],
)
def test_nesting_cycles_and_sharing_are_bounded(value: bytes, tmp_path: Path) -> None:
    tmp_path.joinpath("common.pt").write_bytes(archived(b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."))
    with pytest.raises(DataError, match="nests deeper than 64 or holds over"):
        read_common(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06" + bytes(18), b"\x80\x02}.", bytes(1000)])
def test_a_file_that_is_no_archive_is_a_data_error(data: bytes, tmp_path: Path) -> None:
    tmp_path.joinpath("common.pt").write_bytes(data)
    with pytest.raises(DataError):
        read_common(tmp_path)


def test_a_file_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        read_archive(tmp_path / "missing.pt")


@pytest.mark.parametrize("fields", [100, pytest.param(None, marks=pytest.mark.slow)])
def test_mutated_files_end_in_a_value_or_a_data_error(tmp_path: Path, fields: int | None) -> None:
    """A hundred arguments have every form; all 900 take half a minute."""
    args = vars(args_namespace(SPARSE, padded_vocab_size=1024))
    whole = write_common(common_state(Namespace(**dict(list(args.items())[:fields]))))
    path = tmp_path / "common.pt"
    path.write_bytes(whole)
    with path.open("r+b", buffering=0) as file:
        for position in range(0, len(whole), 5):
            for value in (0, 0xFF, whole[position] ^ 0x11):
                os.pwrite(file.fileno(), bytes([value]), position)
                try:
                    read_common(tmp_path)
                except DataError:
                    continue
            os.pwrite(file.fileno(), whole[position : position + 1], position)


def test_only_plain_values_can_be_written() -> None:
    with pytest.raises(TypeError, match="Foreign"):
        write_common({"a": Foreign()})
