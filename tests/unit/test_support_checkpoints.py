"""The checkpoint makers: complete, distinct, repeatable, and like the releases where it matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.checkpoints import (
    MODELS,
    load_config,
    load_tensors,
    make_checkpoint,
    make_headers_only,
    make_proportioned,
    raw_config,
)
from tests.support.golden import load_golden


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    return {model: make_checkpoint(model, folder / model) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_all_but_the_mtp_layer(made: dict[str, Path], model: str) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    _, info = auto.from_pretrained(made[model], output_loading_info=True)
    layers = load_config(made[model])["num_hidden_layers"]
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith(f"model.layers.{layers}.") for name in info["unexpected_keys"])
    assert bool(info["unexpected_keys"]) == model.startswith("glm")


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_distinct_but_the_copies_of_glm4_moe(made: dict[str, Path], model: str) -> None:
    seen: dict[bytes, str] = {}
    repeated = set()
    for name, tensor in load_tensors(made[model]).items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        if data in seen:
            repeated |= {name, seen[data]}
        seen[data] = name
    copies = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    glm4_moe = model.startswith("glm-4.5")
    assert repeated == (copies | {"model.embed_tokens.weight", "lm_head.weight"} if glm4_moe else set())


def test_glm_5_2_shares_indexes_and_its_mtp_layer_owns_one(made: dict[str, Path]) -> None:
    config, tensors = load_config(made["glm-5.2"]), load_tensors(made["glm-5.2"])
    owners = [int(name.split(".")[2]) for name in tensors if name.endswith("indexer.wk.weight")]
    types = config["indexer_types"]
    assert sorted(owners) == [*(layer for layer, kind in enumerate(types) if kind == "full"), 8]
    assert types.count("shared") == 4
    assert types[4] == "full", "a second pipeline stage of half the layers must start on an owner"
    assert config["head_dim"] == config["qk_nope_head_dim"] != config["qk_rope_head_dim"]


def test_routers_are_fp32_and_the_bias_needs_it(made: dict[str, Path]) -> None:
    tensors = load_tensors(made["glm-5.2"])
    bias = tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == tensors["model.layers.3.mlp.gate.weight"].dtype == torch.float32
    assert not torch.equal(bias, bias.bfloat16().float())


def test_router_dtypes_can_be_chosen(tmp_path: Path) -> None:
    make_checkpoint("glm-4.5", tmp_path, router_bias_dtype="bfloat16", router_weight_dtype="bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in load_tensors(tmp_path).items() if ".gate." in name}
    assert set(dtypes.values()) == {torch.bfloat16}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, made: dict[str, Path]) -> None:
    again = make_checkpoint("glm-5.2", tmp_path / "again")
    other = make_checkpoint("glm-5.2", tmp_path / "other", seed=1)
    for file in made["glm-5.2"].iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
        if file.suffix == ".safetensors":
            assert (other / file.name).read_bytes() != file.read_bytes()


def test_index_shards_and_side_files_agree(made: dict[str, Path]) -> None:
    folder = made["glm-5.2"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = load_tensors(folder)
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 4
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert names | {"LICENSE", "modeling_custom.py"} <= {file.name for file in folder.iterdir()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Experts share a layer: über 7."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < load_config(folder)["vocab_size"]


@pytest.mark.parametrize("kept", [False, True])
def test_a_tied_head_is_stored_on_request(tmp_path: Path, kept: bool) -> None:
    make_checkpoint("qwen3", tmp_path, keep_tied_head=kept, shard_size="1GB")
    tensors = load_tensors(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert ("lm_head.weight" in tensors) == kept
    if kept:
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("model", MODELS)
def test_sizes_that_could_be_confused_differ(model: str) -> None:
    config = raw_config(model)
    keys = ["hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"]
    keys += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads", "n_routed_experts"]
    numbers = [config[key] for key in keys if key in config]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.slow
def test_a_full_size_model_is_headers_on_holes(tmp_path: Path) -> None:
    make_headers_only("glm-5.2", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = list(tmp_path.glob("*.safetensors"))
    assert set(index["weight_map"]) == set(load_golden("glm-5.2"))
    assert index["metadata"]["total_size"] == 1_506_898_995_200
    assert sum(file.stat().st_size for file in files) > 1.5e12
    assert sum(file.stat().st_blocks * 512 for file in files) < 64e6


def test_proportioned_data_is_random_finite_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint_headers.DATA", _shrunk_data(tmp_path / "data"))
    make_proportioned(tmp_path / "out", 0.02, shard_bytes=4 * 10**6)
    tensors = load_tensors(tmp_path / "out")
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert 20e6 <= total <= 22e6
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert len(
        {tensor.flatten()[:4].view(torch.uint8).numpy().tobytes() for tensor in tensors.values()}
    ) == len(tensors)
    experts = load_config(tmp_path / "out")["n_routed_experts"]
    assert f"model.layers.4.mlp.experts.{experts - 1}.down_proj.weight" in tensors


def _shrunk_data(folder: Path) -> Path:
    """A data folder whose GLM-5.2 is small, so that its proportions can be tried in a moment."""
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "glm-5.2.json").write_text(json.dumps(raw_config("glm-5.2")))
    return folder
