"""What cannot be verified is refused with its reason and a way out, before anything heavy happens."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from glmconv.basics.errors import DataError, StorageError, UsageError
from glmconv.basics.sizes import parse_size
from glmconv.commands.convert import convert
from glmconv.source.source import SourceOptions
from glmconv.tables.registry import get_bridge
from glmconv.tables.spec import ModelSpec
from glmconv.verify.options import VerifyOptions, parse_layers
from glmconv.verify.pair import choose_device, open_pair, require_packages
from glmconv.verify.tokens import shifted, tokens_for
from tests.support.checkpoints import load_tensors, raw_config
from tests.support.conversions import to_megatron

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory, checkpoint: Make) -> Path:
    root = tmp_path_factory.mktemp("pair") / "glm-5"
    to_megatron(checkpoint("glm-5"), root)
    return root


def spec(model: str = "glm-5") -> ModelSpec:
    config = raw_config(model)
    return get_bridge(config["model_type"]).spec(config, {})


def copied(hf: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(hf, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_a_right_pair_opens(checkpoint: Make, megatron: Path) -> None:
    pair = open_pair(checkpoint("glm-5"), megatron)
    assert (pair.unit, pair.warnings) == (megatron / "release", [])


def test_another_model_is_refused_with_every_difference(checkpoint: Make, megatron: Path) -> None:
    with pytest.raises(DataError, match="different models") as caught:
        open_pair(checkpoint("glm-5.2"), megatron)
    assert {defect.what.split()[0] for defect in caught.value.defects} >= {"num_layers", "moe_layers", "dsa"}
    assert "glmconv convert" in caught.value.hint


def test_another_vocabulary_is_said_so(checkpoint: Make, megatron: Path, tmp_path: Path) -> None:
    smaller = copied(checkpoint("glm-5"), tmp_path / "hf")
    unit = tmp_path / "megatron" / "release"
    shutil.copytree(megatron / "release", unit)
    config = json.loads((unit / "hf" / "config.json").read_text())
    (unit / "hf" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(DataError, match="another vocabulary") as caught:
        open_pair(smaller, unit)
    assert [defect.what for defect in caught.value.defects] == ["vocab_size is 384 in HF, 300 in Megatron"]


def test_a_torch_dist_without_a_config_is_read_with_that_of_the_hf_side(
    checkpoint: Make, megatron: Path, tmp_path: Path
) -> None:
    unit = tmp_path / "iter_0000001"
    shutil.copytree(megatron / "release", unit)
    shutil.rmtree(unit / "hf")
    (unit / "glmconv.json").unlink()
    assert open_pair(checkpoint("glm-5"), unit).megatron.spec == spec_of_files(checkpoint("glm-5"))
    with pytest.raises(DataError):
        open_pair(checkpoint("glm-4.5"), unit)


def spec_of_files(hf: Path) -> ModelSpec:
    from glmconv.source.open import open_source

    return open_source(hf).spec


def test_a_missing_tensor_is_refused(checkpoint: Make, megatron: Path, tmp_path: Path) -> None:
    broken = copied(checkpoint("glm-5"), tmp_path / "hf")
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    gone = next(name for name in index["weight_map"] if name.endswith("layers.2.self_attn.o_proj.weight"))
    del index["weight_map"][gone]
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError):
        open_pair(broken, megatron)


def test_an_mtp_layer_that_the_hf_side_lost_is_left_out_with_a_warning(
    checkpoint: Make, megatron: Path, tmp_path: Path
) -> None:
    """transformers drops MTP layers when it loads and saves."""
    hf = tmp_path / "hf"
    hf.mkdir()
    tensors = {n: t for n, t in load_tensors(checkpoint("glm-5")).items() if ".layers.4." not in n}
    save_file(tensors, hf / "model.safetensors")
    shutil.copy(checkpoint("glm-5") / "config.json", hf)
    pair = open_pair(hf, megatron)
    assert (pair.hf.spec.num_mtp, pair.megatron.spec.num_mtp) == (0, 0)
    assert any("MTP" in line for line in pair.warnings)


def test_an_mtp_layer_that_the_megatron_side_lost_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    without = SourceOptions(drop_mtp=True)
    unit = convert(checkpoint("glm-5"), tmp_path / "without", source=without).path
    shutil.copy(checkpoint("glm-5") / "config.json", unit / "hf" / "config.json")
    with pytest.raises(DataError, match="missing"):
        open_pair(checkpoint("glm-5"), unit)


def test_the_wrong_order_is_told_with_the_right_command(checkpoint: Make, megatron: Path) -> None:
    with pytest.raises(UsageError, match="wrong order") as caught:
        open_pair(megatron, checkpoint("glm-5"))
    assert str(checkpoint("glm-5")) in caught.value.hint
    with pytest.raises(UsageError, match="no torch_dist") as caught:
        open_pair(checkpoint("glm-5"), checkpoint("glm-5.2"))
    assert "glmconv convert" in caught.value.hint
    with pytest.raises(StorageError):
        open_pair(checkpoint("glm-5"), megatron.parent / "nothing")


@pytest.mark.parametrize("absent", ["transformers", "megatron.core"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "glmconv.verify.pair.importlib.util.find_spec", lambda name: None if name == absent else real(name)
    )
    with pytest.raises(UsageError, match=absent.replace(".", "-")) as caught:
        require_packages()
    assert caught.value.hint == "pip install 'glmconv[verify]'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="no GPU") as caught:
        choose_device("cuda")
    assert "--device cpu" in caught.value.hint
    assert choose_device("auto") == choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"random": 1, "prompt": "hello"}, "exclude each other"),
        ({"seq_len": 0}, "--seq-len must be at least 1"),
        ({"index_topk": -1}, "--index-topk must be at least 1"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        VerifyOptions(**options).check()


def test_top_k_can_only_be_lowered_and_only_where_there_is_one() -> None:
    assert VerifyOptions(index_topk=4).top_k(spec()) == 4
    with pytest.raises(UsageError, match="above the model's 8"):
        VerifyOptions(index_topk=9).top_k(spec())
    with pytest.raises(UsageError, match="for models with an indexer"):
        VerifyOptions(index_topk=4).top_k(spec("qwen3"))


@pytest.mark.parametrize(
    ("text", "range_"), [("2:5", (2, 5)), (":3", (0, 3)), ("2:", (2, -1)), ("4", (4, 5)), (":", (0, -1))]
)
def test_layer_ranges(text: str, range_: tuple[int, int]) -> None:
    assert parse_layers(text) == range_


@pytest.mark.parametrize("text", ["5:2", "a:b", "-1:3", "3:3"])
def test_bad_layer_ranges(text: str) -> None:
    with pytest.raises(UsageError, match="not a range"):
        parse_layers(text)


def test_sizes() -> None:
    assert [parse_size("--max-memory", text) for text in ("8GB", "1.5MiB", "500 kb", "12")] == [
        8 * 10**9,
        3 << 19,
        500_000,
        12,
    ]
    with pytest.raises(UsageError, match="not a size"):
        parse_size("--max-memory", "much")


def test_random_tokens_are_enough_for_a_sparse_selection_and_always_the_same(tmp_path: Path) -> None:
    tokens = tokens_for(VerifyOptions(random=3), spec(), tmp_path)
    assert tokens.shape == (3, 16)
    assert torch.equal(tokens, tokens_for(VerifyOptions(random=3), spec(), tmp_path))
    assert tokens_for(VerifyOptions(seq_len=20), spec(), tmp_path).shape == (1, 20)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[1, 2, 3]", (1, 3)), ("[[1, 2, 3], [4, 5]]", (2, 2)), ("1 2\n3, 4", (1, 4))],
)
def test_token_files(tmp_path: Path, text: str, shape: tuple[int, int]) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    assert tuple(tokens_for(VerifyOptions(tokens=path), spec(), tmp_path).shape) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 384]", "384 is not in the vocabulary"),
        ("[]", "no token ids"),
        ('["a"]', "no token ids"),
        ("7", "no token ids"),
        ("[3]", "fewer than 2"),
    ],
)
def test_bad_token_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        tokens_for(VerifyOptions(tokens=path), spec(), tmp_path)


def test_tokens_that_cannot_be_read(tmp_path: Path, checkpoint: Make) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        tokens_for(VerifyOptions(tokens=tmp_path / "nothing"), spec(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="tokenizer") as caught:
        tokens_for(VerifyOptions(prompt="hello"), spec(), tmp_path)
    assert "--tokens" in caught.value.hint


def test_shifted_tokens_end_in_zeros_as_in_megatron_core() -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert shifted(tokens, 0) is tokens
    assert shifted(tokens, 2).tolist() == [[3, 4, 0, 0]]
