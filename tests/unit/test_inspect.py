"""``inspect`` says what lies at a path, also where no table knows the family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glmconv.basics.errors import DataError, StorageError
from glmconv.commands.inspect import inspect, ranges
from tests.support.broken import configure, copy, run_cli
from tests.support.checkpoints import load_tensors
from tests.support.conversions import to_megatron

Make = Callable[..., Path]


def test_a_hugging_face_checkpoint(checkpoint: Make) -> None:
    path = checkpoint("glm-5.2")
    report = inspect(path)
    tensors = load_tensors(path)
    assert (report.kind, report.layout, report.model_type) == ("hf", "hf", "glm_moe_dsa")
    assert report.understood
    assert "GLM-5.2" in report.titles
    assert report.facts["tensors"] == str(len(tensors))
    assert report.facts["parameters"] == f"{sum(t.numel() for t in tensors.values()):,}"
    assert sum(line.bytes for line in report.dtypes) == sum(t.nbytes for t in tensors.values())
    assert report.model["MTP layers"] == "1"
    assert report.model["indexers"].startswith("4 decoder layers own one: 0-1, 4, 7; 5 in the files")
    assert report.manifest is None
    assert report.tensors == []


@pytest.mark.parametrize("dialect", ["mcore", "mcore-0.18", "slime"])
def test_a_torch_dist_by_root_and_by_unit(checkpoint: Make, tmp_path: Path, dialect: str) -> None:
    unit = to_megatron(checkpoint("glm-5.2"), tmp_path / "out", dialect, iteration=7)
    for path in (tmp_path / "out", unit):
        report = inspect(path)
        assert report.layout == f"megatron ({dialect})"
        assert report.facts["iteration"] == "7"
        assert "checkpoint_version" in report.facts["common state"]
        assert report.facts["trainer's state"] == "none"
        assert report.manifest is not None
        assert report.manifest["dialect"] == dialect
        assert report.manifest["files"] > 5


def test_tensors_that_fit_a_glob(checkpoint: Make, tmp_path: Path) -> None:
    found = inspect(checkpoint("glm-5.2"), match="*.layers.4.*.wk.weight").tensors
    assert [(one.name, one.dtype, one.shape) for one in found] == [
        ("model.layers.4.self_attn.indexer.wk.weight", "BF16", [16, 64])
    ]
    assert found[0].files[0].endswith(".safetensors")
    assert len(inspect(checkpoint("glm-5.2"), match="*").tensors) == len(load_tensors(checkpoint("glm-5.2")))
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    [stacked] = inspect(unit, match="*.linear_fc2.weight").tensors
    assert (stacked.name, stacked.shape) == ("decoder.layers.mlp.linear_fc2.weight", [4, 64, 112])


def test_an_unknown_family_as_far_as_headers_go(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("qwen3"), tmp_path / "other")
    configure(other, model_type="gpt_neox")
    report = inspect(other, match="*.k_proj.weight")
    assert not report.understood
    assert "gpt_neox" in report.why
    assert report.model_type == "gpt_neox"
    assert len(report.tensors) == 4
    assert report.facts["tensors"] == "46"


def test_a_quantised_checkpoint_is_named(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("qwen3"), tmp_path / "other")
    configure(other, quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
    report = inspect(other)
    assert report.facts["quantised"] == "fp8"
    assert not report.understood


def test_a_torch_dist_without_a_config(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    (unit / "hf" / "config.json").unlink()
    report = inspect(tmp_path / "out")
    assert not report.understood
    assert "--origin-hf-dir" in report.why
    assert report.facts["tensors"] == "10"


def test_wrong_headers_are_an_error(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("qwen3"), tmp_path / "other")
    file = next(other.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="truncated"):
        inspect(other)
    with pytest.raises(StorageError):
        inspect(tmp_path / "nothing")


def test_ranges_of_numbers() -> None:
    assert ranges([0, 1, 2, 6, 10, 11]) == "0-2, 6, 10-11"
    assert ranges([]) == ""


def test_the_command(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = to_megatron(checkpoint("glm-5.2"), tmp_path / "out", "slime")
    ran = run_cli(monkeypatch, capsys, "inspect", tmp_path / "out", "--tensors", "*.wq_b.*")
    assert ran.code == 0
    assert "megatron (slime)" in ran.out
    assert "decoder.layers.4.self_attention.wq_b.weight" in ran.out
    assert "linear_proj" not in ran.out
    assert (
        "decoder.layers.0.input_layernorm.weight"
        in run_cli(monkeypatch, capsys, "inspect", unit, "--tensors").out
    )
    content = json.loads(run_cli(monkeypatch, capsys, "inspect", unit, "--json").out)
    assert content["layout"] == "megatron (slime)"
    assert run_cli(monkeypatch, capsys, "inspect", tmp_path / "none").code == 3
