"""What a conversion writes, read by torch, equals a hand-written reference; round trips are exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch

from glmconv.basics.errors import DataError
from glmconv.commands.convert import convert
from glmconv.plan.planner import TargetOptions
from glmconv.source.source import SourceOptions
from tests.support.checkpoints import MODELS, load_config, load_tensors
from tests.support.conversions import (
    assert_same_bytes,
    differing_tensors,
    read_torch_dist,
    to_hf,
    to_megatron,
)
from tests.support.mutants import MUTANTS, Mutant, planted
from tests.support.reference import DIALECTS, hf_to_megatron, hub_to_stacked

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", MODELS)
def test_megatron_tensors_equal_the_reference(
    checkpoint: Checkpoint, tmp_path: Path, model: str, dialect: str
) -> None:
    hf = checkpoint(model)
    unit = to_megatron(hf, tmp_path / "out", dialect)
    expected = hf_to_megatron(load_tensors(hf), load_config(hf), dialect)
    assert differing_tensors(read_torch_dist(unit), expected) == []


@pytest.mark.parametrize("layer_keys", ["stacked", "per-layer"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_layer_keys_of_either_kind(
    checkpoint: Checkpoint, tmp_path: Path, model: str, layer_keys: str
) -> None:
    hf = checkpoint(model)
    unit = to_megatron(hf, tmp_path / "out", layer_keys=layer_keys)
    expected = hf_to_megatron(load_tensors(hf), load_config(hf), "mcore", layer_keys)
    assert differing_tensors(read_torch_dist(unit), expected) == []
    assert_same_bytes(to_hf(tmp_path / "out", tmp_path / "back"), hf)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", MODELS)
def test_back_to_hf_is_byte_identical(
    checkpoint: Checkpoint, tmp_path: Path, model: str, dialect: str
) -> None:
    hf = checkpoint(model)
    to_megatron(hf, tmp_path / "out", dialect)
    assert_same_bytes(to_hf(tmp_path / "out", tmp_path / "back"), hf)


@pytest.mark.parametrize(("first", "second"), list(permutations(DIALECTS, 2)))
@pytest.mark.parametrize("model", ["glm-5.2", "qwen3-moe"])
def test_dialect_to_dialect_and_back_is_byte_identical(
    checkpoint: Checkpoint, tmp_path: Path, model: str, first: str, second: str
) -> None:
    hf = checkpoint(model)
    one = to_megatron(hf, tmp_path / "one", first)
    two = to_megatron(tmp_path / "one", tmp_path / "two", second)
    expected = hf_to_megatron(load_tensors(hf), load_config(hf), second)
    assert differing_tensors(read_torch_dist(two), expected) == []
    again = to_megatron(tmp_path / "two", tmp_path / "again", first)
    assert differing_tensors(read_torch_dist(again), read_torch_dist(one)) == []


@pytest.mark.parametrize("model", ["glm-5.2", "glm-4.5", "qwen3-moe"])
def test_stacked_experts_equal_the_reference_and_go_back(
    checkpoint: Checkpoint, tmp_path: Path, model: str
) -> None:
    hf = checkpoint(model)
    stacked = to_hf(hf, tmp_path / "stacked", to="hf-stacked")
    assert differing_tensors(load_tensors(stacked), hub_to_stacked(load_tensors(hf))) == []
    hub = to_hf(stacked, tmp_path / "hub")
    assert differing_tensors(load_tensors(hub), load_tensors(hf)) == []
    megatron = to_megatron(stacked, tmp_path / "megatron")
    expected = hf_to_megatron(load_tensors(hf), load_config(hf), "mcore")
    assert differing_tensors(read_torch_dist(megatron), expected) == []


def test_own_shards_hold_the_same_tensors_and_a_true_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
    hf = checkpoint("glm-5.2")
    to_megatron(hf, tmp_path / "out")
    back = to_hf(tmp_path / "out", tmp_path / "back", max_shard_size=100_000)
    assert len(list(back.glob("*.safetensors"))) > 5
    assert differing_tensors(load_tensors(back), load_tensors(hf)) == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_bf16_router_bias_is_widened_exactly_and_returns(
    checkpoint: Checkpoint, tmp_path: Path, dialect: str
) -> None:
    hf = checkpoint("glm-5.2", router_bias_dtype="bfloat16")
    unit = to_megatron(hf, tmp_path / "out", dialect)
    biases = {k: v for k, v in read_torch_dist(unit).items() if k.endswith("expert_bias")}
    assert biases
    assert all(bias.dtype is torch.float32 for bias in biases.values())
    first = load_tensors(hf)["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(biases["decoder.layers.2.mlp.router.expert_bias"], first.float())
    assert_same_bytes(to_hf(tmp_path / "out", tmp_path / "back"), hf)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype_casts_as_torch_does_and_spares_the_router_bias(
    checkpoint: Checkpoint, tmp_path: Path, dtype: str
) -> None:
    hf = checkpoint("glm-5.2")
    unit = to_megatron(hf, tmp_path / "out", dtype=dtype)
    wanted = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(getattr(torch, dtype))
        for name, tensor in load_tensors(hf).items()
    }
    expected = hf_to_megatron(wanted, load_config(hf), "mcore")
    assert differing_tensors(read_torch_dist(unit), expected) == []
    assert load_config(to_hf(tmp_path / "out", tmp_path / "back"))["dtype"] == dtype


def test_a_padded_vocabulary_is_zero_past_the_end_and_cut_on_the_way_back(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    hf = checkpoint("glm-5.2")
    unit = to_megatron(hf, tmp_path / "out", padded_vocab=512)
    head = read_torch_dist(unit)["output_layer.weight"]
    vocab = load_config(hf)["vocab_size"]
    assert head.shape[0] == 512
    assert torch.equal(head[:vocab], load_tensors(hf)["lm_head.weight"])
    assert not head[vocab:].any()
    assert_same_bytes(to_hf(tmp_path / "out", tmp_path / "back"), hf)


def test_a_tied_head_that_the_origin_stores_is_checked_dropped_and_written_again(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    hf = checkpoint("qwen3", keep_tied_head=True)
    unit = to_megatron(hf, tmp_path / "out")
    assert "output_layer.weight" not in read_torch_dist(unit)
    assert_same_bytes(to_hf(tmp_path / "out", tmp_path / "back"), hf)


def test_mtp_is_kept_unless_dropped_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    hf = checkpoint("glm-5.2")
    report = convert(
        hf, tmp_path / "out", source=SourceOptions(drop_mtp=True), target=TargetOptions(to="megatron")
    )
    assert not any(name.startswith("mtp.") for name in read_torch_dist(report.path))
    dropped = {name for name, _, _ in report.dropped}
    assert dropped == {n for n in load_tensors(hf) if n.startswith("model.layers.8.")}
    back = to_hf(tmp_path / "out", tmp_path / "back")
    assert load_config(back)["num_nextn_predict_layers"] == 0


CASES = [
    pytest.param(mutant, model, dialect, id=f"{mutant.name}-{model}-{dialect}")
    for mutant in MUTANTS
    for model in mutant.models
    for dialect in mutant.dialects
]


@pytest.mark.parametrize(("mutant", "model", "dialect"), CASES)
def test_every_mutant_of_the_tables_is_caught_by_values(
    checkpoint: Checkpoint, tmp_path: Path, mutant: Mutant, model: str, dialect: str
) -> None:
    """The reference tells that a mutant is wrong; only one that loses tensors is refused by the ledger."""
    hf = checkpoint(model)
    with planted(mutant):
        if mutant.spec is not None:
            with pytest.raises(DataError, match=r"neither used nor dropped|not used exactly once"):
                to_megatron(hf, tmp_path / "out", dialect)
            return
        unit = to_megatron(hf, tmp_path / "out", dialect)
    expected = hf_to_megatron(load_tensors(hf), load_config(hf), dialect)
    assert differing_tensors(read_torch_dist(unit), expected) != []
