"""``check --values`` and the checks of router biases, duplicates and padding, on values torch wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from glmconv.basics.errors import Defect
from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.commands.check import check
from glmconv.source.source import SourceOptions
from tests.support.broken import configure, copy, edit, put, tensor_of
from tests.support.checkpoints import load_config, load_tensors
from tests.support.conversions import to_hf, to_megatron
from tests.support.reference import hf_to_megatron

Make = Callable[..., Path]
ALL = CheckOptions(values=True)


@pytest.fixture(params=["hf", "hf-stacked", "mcore", "slime"])
def layout(request: pytest.FixtureRequest) -> str:
    """The layout in which a broken checkpoint is checked."""
    return str(request.param)


def as_layout(hf: Path, layout: str, target: Path) -> Path:
    if layout == "hf":
        return hf
    if layout == "hf-stacked":
        return to_hf(hf, target, to=layout)
    return to_megatron(hf, target, layout)


def only(report: CheckReport, kind: str, severity: str = "error") -> Defect:
    """The one finding; there must be no other."""
    [found] = report.findings
    assert (found.kind, found.severity) == (kind, severity)
    assert report.exit_code == (1 if severity == "error" else 0)
    return found


def set_at(row: int, col: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[row, col] = value
        return tensor

    return change


@pytest.mark.parametrize(("value", "word"), [("nan", "1 NaN"), ("inf", "1 Inf"), ("-inf", "1 Inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.1.self_attn.indexer.wq_b.weight",
        "model.layers.8.eh_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_value_that_is_no_number(
    checkpoint: Make, tmp_path: Path, layout: str, name: str, value: str, word: str
) -> None:
    broken = copy(checkpoint("glm-5.2"), tmp_path / "broken")
    put(broken, name, set_at(11, 7, float(value)))
    found = only(check(as_layout(broken, layout, tmp_path / "out"), ALL), "not-finite")
    assert found.where.startswith(name)
    assert f"{word}, the first at [11, 7]" in found.what


def test_places_count_from_the_tensor_and_not_from_a_block(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    put(broken, "model.layers.1.mlp.down_proj.weight", set_at(50, 100, float("nan")))
    monkeypatch.setattr("glmconv.values.reader.Reader.blocks.__defaults__", (64,))
    assert "first at [50, 100]" in only(check(broken, ALL), "not-finite").what


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_is_scanned(checkpoint: Make, tmp_path: Path, dtype: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    broken = copy(checkpoint("qwen3", dtype=dtype), tmp_path / "broken")
    assert check(broken, ALL).findings == []
    put(broken, name, lambda t: torch.where(torch.arange(112) < 2, float("nan"), t))
    found = only(check(broken, ALL), "not-finite")
    assert "128 NaN, the first at [0, 0]" in found.what


def test_the_largest_finite_values_pass(checkpoint: Make, tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        edge = copy(checkpoint("qwen3", dtype=dtype), tmp_path / dtype)
        most = torch.finfo(getattr(torch, dtype)).max
        put(edge, "model.layers.1.mlp.down_proj.weight", lambda t, most=most: torch.full_like(t, -most))  # type: ignore[misc]
        assert check(edge, ALL).findings == []


def test_a_weight_of_zeros(checkpoint: Make, tmp_path: Path, layout: str) -> None:
    name = "model.layers.3.mlp.experts.1.gate_proj.weight"
    broken = copy(checkpoint("glm-5.2"), tmp_path / "broken")
    put(broken, name, torch.zeros_like)
    found = only(check(as_layout(broken, layout, tmp_path / "out"), ALL), "zero")
    assert found.where.startswith(name)


def test_a_bias_of_zeros_is_a_warning(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("glm-4.5"), tmp_path / "broken")
    put(broken, "model.layers.1.self_attn.q_proj.bias", torch.zeros_like)
    assert "q_proj.bias" in only(check(broken, ALL), "zero", "warning").where


def test_negative_zeros_are_zeros(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    put(broken, "model.norm.weight", lambda tensor: -torch.zeros_like(tensor))
    only(check(broken, ALL), "zero")


def copy_expert(path: Path, layer: int, one: int, onto: int) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.{layer}.mlp.experts.{{}}.{part}.weight"
        held = tensor_of(path, name.format(one))
        put(path, name.format(onto), lambda _, held=held: held)  # type: ignore[misc]


def test_two_experts_that_are_one(checkpoint: Make, tmp_path: Path, layout: str) -> None:
    broken = copy(checkpoint("glm-5.2"), tmp_path / "broken")
    copy_expert(broken, 4, 1, 5)
    copy_expert(broken, 8, 0, 3)
    report = check(as_layout(broken, layout, tmp_path / "out"), ALL)
    assert [finding.kind for finding in report.errors] == ["duplicate-expert"] * 2
    assert "experts of layer 4 hold the same bytes: 1 = 5 (5 of 6 are distinct)" in report.errors[0].what
    assert "experts of layer 8 hold the same bytes: 0 = 3" in report.errors[1].what


def test_experts_alike_in_part_are_two(checkpoint: Make, tmp_path: Path) -> None:
    sound = copy(checkpoint("glm-5.2"), tmp_path / "sound")
    held = tensor_of(sound, "model.layers.4.mlp.experts.1.gate_proj.weight")
    put(sound, "model.layers.4.mlp.experts.5.gate_proj.weight", lambda _: held)
    assert check(sound, ALL).findings == []


def test_experts_numbered_from_zero_on_every_rank(checkpoint: Make, tmp_path: Path) -> None:
    """Two ranks of an expert-parallel group that both wrote experts 0 to 2."""
    broken = copy(checkpoint("qwen3-moe"), tmp_path / "broken")
    for layer in range(4):
        for expert in range(3):
            copy_expert(broken, layer, expert, expert + 3)
    report = check(broken, ALL)
    assert len(report.findings) == 4
    assert "0 = 3, 1 = 4, 2 = 5 (3 of 6 are distinct)" in report.findings[0].what


def test_an_expert_of_another_layer_is_a_warning(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3-moe"), tmp_path / "broken")
    for part in ("gate_proj", "up_proj", "down_proj"):
        held = tensor_of(broken, f"model.layers.1.mlp.experts.2.{part}.weight")
        put(broken, f"model.layers.3.mlp.experts.4.{part}.weight", lambda _, held=held: held)  # type: ignore[misc]
    found = only(check(broken, ALL), "duplicate-expert", "warning")
    assert "expert 4 of layer 3 holds the same bytes as expert 2 of layer 1" in found.what


def test_a_router_bias_in_bf16(checkpoint: Make, tmp_path: Path) -> None:
    narrow = copy(checkpoint("glm-5.2"), tmp_path / "narrow")
    name = "model.layers.3.mlp.gate.e_score_correction_bias"

    def crowd(tensor: Tensor) -> Tensor:
        return (7 + torch.linspace(0, 0.05, len(tensor))).bfloat16()

    put(narrow, name, crowd)
    found = only(check(narrow), "router-bias")
    want = len(crowd(torch.empty(6)).unique())
    assert found.where.startswith(name)
    assert f"is BF16, must be F32: {want} distinct values of 6" in found.what
    assert want < 6


def test_a_router_bias_that_was_in_bf16_before(checkpoint: Make, tmp_path: Path) -> None:
    narrow = checkpoint("glm-4.5", router_bias_dtype="bfloat16")
    assert {finding.kind for finding in check(narrow).errors} == {"router-bias"}
    wide = to_megatron(narrow, tmp_path / "out")
    found = only(check(wide), "router-bias", "warning")
    assert "3 tensors are stored wide but hold only values of bf16" in found.what
    assert "manifest says" in found.what


def test_a_router_bias_of_more_than_bf16_is_not_suspected(checkpoint: Make, tmp_path: Path) -> None:
    """Values of fp16 have bits that bf16 has not."""
    fine = copy(checkpoint("glm-5"), tmp_path / "fine")
    put(fine, "model.layers.1.mlp.gate.e_score_correction_bias", lambda tensor: tensor.half().float())
    assert check(fine).findings == []


def test_every_router_bias_is_reported(checkpoint: Make) -> None:
    report = check(checkpoint("glm-5.2"))
    assert [one.name.split(".")[2] for one in report.locked] == ["2", "3", "4", "5", "6", "7", "8"]
    assert {(one.dtype, one.size, one.distinct) for one in report.locked} == {("F32", 6, 6)}


class TestTying:
    """``tie_word_embeddings`` and the copies inside an MTP layer."""

    def test_a_stored_head_that_repeats_the_embedding(self, checkpoint: Make) -> None:
        report = check(checkpoint("qwen3", keep_tied_head=True), ALL)
        assert report.findings == []
        assert report.facts["embeddings"] == "tied; stored again: lm_head.weight"

    def test_no_stored_head(self, checkpoint: Make) -> None:
        assert check(checkpoint("qwen3")).facts["embeddings"] == "tied, head not stored"

    def test_a_stored_head_that_differs(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("qwen3", keep_tied_head=True), tmp_path / "broken")
        put(broken, "lm_head.weight", set_at(300, 5, 99.0))
        found = only(check(broken), "duplicate")
        assert found.where == "lm_head.weight"
        assert "1 of 24,576 elements differ, the first at [300, 5]" in found.what
        assert "tie_word_embeddings" in found.hint

    def test_a_head_of_another_shape(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("qwen3", keep_tied_head=True), tmp_path / "broken")
        put(broken, "lm_head.weight", lambda tensor: tensor[:-1])
        assert only(check(broken), "duplicate").where == "lm_head.weight"

    def test_an_untied_head_that_is_missing(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("qwen3"), tmp_path / "broken")
        configure(broken, tie_word_embeddings=False)
        assert only(check(broken), "missing").where == "lm_head.weight"

    def test_an_untied_head_that_equals_the_embedding(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("qwen3-untied"), tmp_path / "broken")
        held = tensor_of(broken, "model.embed_tokens.weight")
        put(broken, "lm_head.weight", lambda _: held)
        assert only(check(broken, ALL), "tied", "warning").where.startswith("lm_head.weight")

    def test_a_copy_in_the_mtp_layer_that_differs(self, checkpoint: Make, tmp_path: Path) -> None:
        broken = copy(checkpoint("glm-4.5"), tmp_path / "broken")
        put(broken, "model.layers.4.shared_head.head.weight", lambda tensor: tensor + 1)
        found = only(check(broken), "duplicate")
        assert found.where == "model.layers.4.shared_head.head.weight"
        assert "must repeat lm_head.weight" in found.what


class TestSavedByTorch:
    """A torch_dist that torch's own distributed checkpoint wrote, optimizer and padding included."""

    def save(self, hf: Path, unit: Path, change: Callable[[dict[str, Tensor]], None]) -> CheckReport:
        state = hf_to_megatron(load_tensors(hf), load_config(hf), "mcore")
        change(state)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(unit), no_dist=True)
        torch.save({"checkpoint_version": 3.0}, unit / "common.pt")
        (unit / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        return check(unit, CheckOptions(source=SourceOptions(origin_hf_dir=hf), values=True))

    def test_a_sound_one(self, checkpoint: Make, tmp_path: Path) -> None:
        report = self.save(checkpoint("glm-5.2"), tmp_path / "unit", lambda state: None)
        assert report.findings == []
        assert report.facts["trainer's state"] == "none"
        assert report.scanned == 280

    def test_an_optimizer_is_said_and_not_checked(self, checkpoint: Make, tmp_path: Path) -> None:
        def add(state: dict[str, Tensor]) -> None:
            for name in list(state):
                state[f"optimizer.state.exp_avg.{name}"] = torch.full_like(state[name], float("nan")).float()

        report = self.save(checkpoint("qwen3"), tmp_path / "unit", add)
        assert report.findings == []
        assert report.facts["trainer's state"].startswith("10 optimizer tensors")

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_padding(self, checkpoint: Make, tmp_path: Path, value: float) -> None:
        def pad(state: dict[str, Tensor]) -> None:
            held = state["embedding.word_embeddings.weight"]
            rows = torch.full((16, held.shape[1]), value, dtype=held.dtype)
            rows[1:4] = 0
            state["embedding.word_embeddings.weight"] = torch.cat([held, rows])

        report = self.save(checkpoint("qwen3"), tmp_path / "unit", pad)
        assert report.facts["vocabulary"] == "384 rows, padded to 400"
        if value == 0:
            assert report.findings == []
        else:
            found = only(report, "padding")
            assert found.where == "embedding.word_embeddings.weight"
            assert "13 of 16 rows past the vocabulary are not zero" in found.what

    def test_experts_of_a_fused_tensor(self, checkpoint: Make, tmp_path: Path) -> None:
        def repeat(state: dict[str, Tensor]) -> None:
            for part in ("linear_fc1", "linear_fc2"):
                held = state[f"decoder.layers.3.mlp.experts.experts.{part}.weight"]
                held[5] = held[2]

        report = self.save(checkpoint("glm-5.2"), tmp_path / "unit", repeat)
        assert "experts of layer 3 hold the same bytes: 2 = 5" in only(report, "duplicate-expert").what

    def test_a_missing_tensor(self, checkpoint: Make, tmp_path: Path) -> None:
        def lose(state: dict[str, Tensor]) -> None:
            del state["decoder.layers.4.mlp.router.expert_bias"]

        report = self.save(checkpoint("glm-5.2"), tmp_path / "unit", lose)
        assert only(report, "missing").where == "model.layers.4.mlp.gate.e_score_correction_bias"


def test_one_worker_or_many_find_the_same(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("glm-5.2"), tmp_path / "broken")

    def spoil(tensors: dict[str, Tensor]) -> None:
        for tensor in list(tensors.values())[::3]:
            tensor.view(-1)[0] = float("inf")

    edit(broken, "model.layers.3.input_layernorm.weight", spoil)
    found = [check(broken, CheckOptions(values=True, workers=workers)).findings for workers in (1, 6)]
    assert found[0] == found[1]
    assert len(found[0]) > 5
