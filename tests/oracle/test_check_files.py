"""``check`` names what is wrong with headers, index, config and manifest of broken checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glmconv.basics.errors import StorageError
from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.commands.check import check
from glmconv.source.source import SourceOptions
from tests.support.broken import INDEX, configure, copy, drop, edit, put, run_cli, shard_of, tensor_of
from tests.support.conversions import to_megatron

Make = Callable[..., Path]
ALL = CheckOptions(values=True)
MODELS = ("glm-5", "glm-5.2", "glm-4.5", "glm-4.5-air", "qwen3", "qwen3-untied", "qwen3-moe")


def kinds(report: CheckReport) -> set[str]:
    return {finding.kind for finding in report.errors}


def texts(report: CheckReport) -> str:
    return "\n".join(map(str, report.findings))


@pytest.mark.parametrize("model", MODELS)
def test_sound_checkpoints_of_either_layout_hold(checkpoint: Make, tmp_path: Path, model: str) -> None:
    report = check(checkpoint(model), ALL)
    assert (report.findings, report.exit_code) == ([], 0)
    to_megatron(checkpoint(model), tmp_path / "out")
    converted = check(tmp_path / "out", CheckOptions(values=True, hashes=True))
    assert (converted.findings, converted.exit_code) == ([], 0)
    assert converted.scanned == report.scanned
    assert converted.hashes is not None
    assert converted.hashes.wrong == 0


def test_a_truncated_shard(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    file = shard_of(broken, "model.norm.weight")
    file.write_bytes(file.read_bytes()[:-3])
    report = check(broken)
    assert (kinds(report), report.exit_code) == ({"truncated"}, 1)
    assert file.name in texts(report)


def test_a_header_longer_than_its_file(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    file = shard_of(broken, "model.norm.weight")
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    report = check(broken)
    assert report.exit_code == 1
    assert file.name in texts(report)


def test_the_index_against_the_headers_both_ways(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    index = json.loads((broken / INDEX).read_text())
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    index["weight_map"]["model.layers.9.ghost.weight"] = next(iter(index["weight_map"].values()))
    (broken / INDEX).write_text(json.dumps(index))
    report = check(broken)
    assert (kinds(report), report.exit_code) == ({"index"}, 1)
    assert "model.layers.0.mlp.up_proj.weight" in texts(report)
    assert "model.layers.9.ghost.weight" in texts(report)


def test_an_index_that_names_a_missing_file(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    gone = shard_of(broken, "model.norm.weight")
    gone.unlink()
    report = check(broken)
    assert "missing-file" in kinds(report)
    assert gone.name in texts(report)


def test_a_shard_that_the_index_forgets(checkpoint: Make, tmp_path: Path) -> None:
    stray = copy(checkpoint("qwen3"), tmp_path / "stray")
    save_file({"mtp.weight": torch.ones(2)}, stray / "mtp.safetensors")
    report = check(stray)
    [found] = report.findings
    assert (found.kind, found.severity) == ("stray-file", "warning")
    assert "mtp.weight" in found.what
    assert report.ok


def test_a_wrong_total_size(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    index = json.loads((broken / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (broken / INDEX).write_text(json.dumps(index))
    report = check(broken)
    assert [finding.kind for finding in report.warnings] == ["total-size"]
    assert report.ok


def test_every_missing_extra_and_misshapen_tensor_is_listed(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3-moe"), tmp_path / "broken")
    drop(broken, "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.1.self_attn.o_proj.weight")
    put(broken, "model.layers.0.mlp.experts.0.down_proj.weight", lambda tensor: tensor.T)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.mlp.experts.6.up_proj.weight"] = torch.ones(40, 64)

    edit(broken, "model.layers.3.mlp.experts.5.up_proj.weight", add)
    report = check(broken, ALL)
    found = {(finding.kind, finding.where) for finding in report.errors}
    assert found == {
        ("missing", "model.layers.2.mlp.experts.3.up_proj.weight"),
        ("missing", "model.layers.1.self_attn.o_proj.weight"),
        ("shape", "model.layers.0.mlp.experts.0.down_proj.weight"),
        ("unexpected", "model.layers.3.mlp.experts.6.up_proj.weight"),
    }


def test_an_expert_count_that_the_config_gets_wrong(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3-moe"), tmp_path / "broken")
    configure(broken, num_experts=4)
    report = check(broken)
    assert report.exit_code == 1
    assert "says 4 experts, the files hold 6" in texts(report)
    unit = to_megatron(checkpoint("qwen3-moe"), tmp_path / "out")
    configure(unit / "hf", num_experts=4)
    assert "shape" in kinds(check(unit))


def test_an_mtp_layer_that_is_lost(checkpoint: Make, tmp_path: Path) -> None:
    less = copy(checkpoint("glm-5"), tmp_path / "less")
    drop(less, *[name for name in _names(less) if name.startswith("model.layers.4.")])
    report = check(less)
    assert kinds(report) == {"missing"}
    assert "config.json promises 1 MTP layer(s)" in texts(report)
    assert check(less, CheckOptions(source=SourceOptions(drop_mtp=True))).ok


@pytest.mark.parametrize("layout", ["hf", "megatron"])
def test_an_mtp_layer_that_the_config_denies(checkpoint: Make, tmp_path: Path, layout: str) -> None:
    if layout == "hf":
        broken = copy(checkpoint("glm-4.5"), tmp_path / "broken")
        configure(broken, num_nextn_predict_layers=0)
        where = "model.layers.4"
    else:
        broken = to_megatron(checkpoint("glm-4.5"), tmp_path / "broken")
        configure(broken / "hf", num_nextn_predict_layers=0)
        where = "mtp.layers.0"
    found = [finding for finding in check(broken).errors if finding.kind == "mtp"]
    assert [finding.where for finding in found] == [where]
    assert "num_nextn_predict_layers" in found[0].what


def _names(path: Path) -> list[str]:
    return list(json.loads((path / INDEX).read_text())["weight_map"])


def test_an_unknown_family(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("qwen3"), tmp_path / "other")
    configure(other, model_type="gpt_neox")
    report = check(other)
    assert (kinds(report), report.exit_code) == ({"unreadable"}, 1)
    assert "gpt_neox" in texts(report)


def test_contradicting_fields_of_the_config(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("glm-5.2"), tmp_path / "other")
    configure(other, qk_rope_head_dim=12, rope_parameters=None)
    report = check(other)
    assert "kv_a_proj_with_mqa has 32 rows" in texts(report)
    assert "rope_theta" in texts(report)


@pytest.mark.parametrize(("state", "said"), [({}, "None"), ({"checkpoint_version": 0}, "0")])
def test_a_common_state_that_makes_trainers_move_qkv(
    checkpoint: Make, tmp_path: Path, state: dict[str, int], said: str
) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    torch.save(state, unit / "common.pt")
    report = check(unit)
    assert report.ok
    assert [finding.kind for finding in report.warnings] == ["common-state"]
    assert f"checkpoint_version is {said}:" in texts(report)


def test_what_megatron_core_needs_beside_the_tensors(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    (unit / "common.pt").unlink()
    (unit / "metadata.json").unlink()
    report = check(unit)
    assert [finding.kind for finding in report.warnings] == ["common-state"] * 2
    assert "metadata.json" in texts(report)
    assert "common.pt" in texts(report)


class TestCommand:
    """Exit codes and words of the command line."""

    @pytest.fixture(autouse=True)
    def _here(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.run = lambda *arguments: run_cli(monkeypatch, capsys, *arguments)

    def test_a_sound_one(self, checkpoint: Make) -> None:
        for arguments in ((checkpoint("glm-5"),), ("--model-path", checkpoint("glm-5"))):
            ran = self.run("check", *arguments, "--values")
            assert ran.code == 0
            assert "all checked things hold" in ran.out

    def test_a_broken_one(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("qwen3"), tmp_path / "broken")
        put(broken, "model.norm.weight", torch.zeros_like)
        assert self.run("check", broken).code == 0
        ran = self.run("check", broken, "--values")
        assert ran.code == 1
        assert "model.norm.weight" in ran.out
        assert "1 error" in ran.out
        content = json.loads(self.run("check", broken, "--values", "--json").out)
        assert content["ok"] is False
        assert [finding["kind"] for finding in content["findings"]] == ["zero"]

    def test_mistakes_in_use(self, checkpoint: Make, tmp_path: Path) -> None:
        path = checkpoint("qwen3")
        for arguments in (
            (path, "--model-path", path),
            (path, "--hash"),
            (path, "--against", path),
            (path, "--pp-first", 1),
            (path, "--pp", 99),
            (path, "--model-type", "qwen3_moe"),
        ):
            ran = self.run("check", *arguments)
            assert (ran.code, ran.out) == (2, ""), arguments
            assert "glmconv:" in ran.err
        assert self.run("check", tmp_path / "none").code == 3

    def test_many_findings_are_counted_and_not_all_shown(self, checkpoint: Make, tmp_path: Path) -> None:
        less = copy(checkpoint("glm-5"), tmp_path / "less")
        gone = [name for name in _names(less) if name.startswith("model.layers.3.")]
        drop(less, *gone)
        ran = self.run("check", less)
        assert f"… {len(gone) - 20} more" in ran.out
        assert f"{len(gone)} errors" in ran.out


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        check(tmp_path / "none")


def test_a_shrinking_file_is_a_finding(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    file = shard_of(broken, "model.layers.3.mlp.down_proj.weight")
    assert tensor_of(broken, "model.layers.3.mlp.down_proj.weight").nbytes > 100

    def shrink(report: CheckReport, subject: object) -> None:
        file.write_bytes(file.read_bytes()[:-100])

    monkeypatch.setattr("glmconv.commands.check.check_padding", shrink)
    report = check(broken, ALL)
    assert kinds(report) == {"unreadable"}
    assert file.name in texts(report)
