"""``diff`` names every tensor that differs, how far and where, across layouts, dialects and dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glmconv.basics.errors import StorageError
from glmconv.commands.diff import DiffOptions, DiffReport, diff
from glmconv.source.source import SourceOptions
from glmconv.values.differences import Difference
from tests.support.broken import configure, copy, drop, edit, put, run_cli, tensor_of
from tests.support.conversions import to_hf, to_megatron

Make = Callable[..., Path]
DOWN = "model.layers.1.mlp.down_proj.weight"


def odd(report: DiffReport) -> dict[str, Difference]:
    return {one.name: one for one in report.tensors if one.status != "equal"}


@pytest.mark.parametrize("model", ["glm-5.2", "glm-4.5", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("dialect", ["mcore", "mcore-0.18", "slime", "miles"])
def test_a_conversion_equals_its_source(checkpoint: Make, tmp_path: Path, model: str, dialect: str) -> None:
    hf = checkpoint(model)
    unit = to_megatron(hf, tmp_path / "out", dialect)
    for a, b in ((hf, unit), (unit, hf), (tmp_path / "out", unit)):
        report = diff(a, b)
        assert report.equal
        assert report.exit_code == 0
        assert odd(report) == {}
        assert len(report.tensors) >= 46


def test_stacked_experts_equal_the_hub_names(checkpoint: Make, tmp_path: Path) -> None:
    stacked = to_hf(checkpoint("qwen3-moe"), tmp_path / "stacked", to="hf-stacked")
    report = diff(checkpoint("qwen3-moe"), stacked)
    assert report.layouts == ("hf", "hf-stacked")
    assert report.equal


def test_one_element_is_found_with_its_place_and_distance(checkpoint: Make, tmp_path: Path) -> None:
    hf = checkpoint("qwen3", dtype="float32")
    broken = copy(hf, tmp_path / "broken")

    def change(tensor: Tensor) -> Tensor:
        tensor[7, 3] += 0.25
        tensor[63, 111] -= 2.0
        return tensor

    put(broken, DOWN, change)
    for unit in (broken, to_megatron(broken, tmp_path / "out")):
        report = diff(hf, unit)
        assert report.exit_code == 1
        [found] = odd(report).values()
        assert (found.name, found.status, found.count, found.first) == (DOWN, "differs", 2, (7, 3))
        assert found.elements == 64 * 112
        assert found.max_abs == pytest.approx(2.0, abs=1e-5)


def test_places_count_from_the_tensor_and_not_from_a_block(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")

    def change(tensor: Tensor) -> Tensor:
        tensor[50, 100] += 9
        tensor[60, 100] += 1
        return tensor

    put(broken, DOWN, change)
    monkeypatch.setattr("glmconv.values.reader.Reader.blocks.__defaults__", (64,))
    [found] = odd(diff(checkpoint("qwen3"), broken)).values()
    assert (found.count, found.first) == (2, (50, 100))
    assert found.max_abs == pytest.approx(9, abs=0.1)


def test_a_value_that_is_not_a_number_has_no_distance(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")

    def change(tensor: Tensor) -> Tensor:
        tensor[0, 0] = float("nan")
        tensor[0, 1] += 1
        return tensor

    put(broken, DOWN, change)
    [found] = odd(diff(checkpoint("qwen3"), broken)).values()
    assert (found.count, found.max_abs) == (2, None)
    assert diff(broken, broken).equal


def test_the_sign_of_zero_counts_as_a_difference(checkpoint: Make, tmp_path: Path) -> None:
    left, right = copy(checkpoint("qwen3"), tmp_path / "a"), copy(checkpoint("qwen3"), tmp_path / "b")
    put(left, DOWN, torch.zeros_like)
    put(right, DOWN, lambda tensor: -torch.zeros_like(tensor))
    [found] = odd(diff(left, right)).values()
    assert (found.status, found.max_abs) == ("differs", 0.0)


def test_missing_and_extra_tensors(checkpoint: Make, tmp_path: Path) -> None:
    less = copy(checkpoint("qwen3"), tmp_path / "less")
    drop(less, DOWN)
    assert {name: one.status for name, one in odd(diff(checkpoint("qwen3"), less)).items()} == {
        DOWN: "missing"
    }
    assert {name: one.status for name, one in odd(diff(less, checkpoint("qwen3"))).items()} == {DOWN: "extra"}
    assert diff(less, less).equal


def test_tensors_that_no_rule_knows_are_compared(checkpoint: Make, tmp_path: Path) -> None:
    more = copy(checkpoint("qwen3"), tmp_path / "more")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.extra.weight"] = torch.ones(3)

    edit(more, DOWN, add)
    [found] = odd(diff(checkpoint("qwen3"), more)).values()
    assert (found.name, found.status) == ("model.layers.1.extra.weight", "extra")
    assert diff(more, more).equal


def test_another_shape(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    put(broken, DOWN, lambda tensor: tensor.T)
    report = diff(checkpoint("qwen3"), broken)
    found = odd(report)[DOWN]
    assert (found.status, found.shapes) == ("shape", ([64, 112], [112, 64]))
    assert report.exit_code == 1


def test_another_dtype_with_the_same_values_is_a_difference(checkpoint: Make, tmp_path: Path) -> None:
    wide = copy(checkpoint("qwen3"), tmp_path / "wide")
    put(wide, DOWN, Tensor.float)
    report = diff(checkpoint("qwen3"), wide)
    [found] = odd(report).values()
    assert (found.status, found.dtypes, found.count, found.max_abs) == ("differs", ("BF16", "F32"), 0, 0.0)
    assert report.exit_code == 1


def test_a_cast_shows_its_rounding(checkpoint: Make, tmp_path: Path) -> None:
    exact = checkpoint("qwen3", dtype="float32")
    cast = to_hf(exact, tmp_path / "cast", dtype="bfloat16")
    found = {one.name: one for one in diff(exact, cast).tensors}[DOWN]
    want = tensor_of(exact, DOWN).double()
    apart = (want - want.bfloat16().double()).abs()
    assert found.max_abs == apart.max().item()
    assert found.count == apart.count_nonzero().item()


def test_a_router_bias_that_megatron_keeps_wide_is_no_difference(checkpoint: Make, tmp_path: Path) -> None:
    narrow = checkpoint("glm-4.5", router_bias_dtype="bfloat16")
    report = diff(narrow, to_megatron(narrow, tmp_path / "out"))
    assert {one.status for one in odd(report).values()} == {"widened"}
    assert report.count("widened") == 3
    assert report.equal


def test_a_tied_head_is_compared_with_the_embedding(checkpoint: Make, tmp_path: Path) -> None:
    kept = checkpoint("qwen3", keep_tied_head=True)
    report = diff(kept, checkpoint("qwen3"))
    assert report.equal
    assert "once" in next(one.note for one in report.tensors if one.name == "lm_head.weight")
    broken = copy(kept, tmp_path / "broken")
    put(broken, "lm_head.weight", lambda tensor: tensor + 1)
    assert list(odd(diff(broken, checkpoint("qwen3")))) == ["lm_head.weight"]
    assert list(odd(diff(checkpoint("qwen3"), broken))) == ["lm_head.weight"]


def test_copies_in_an_mtp_layer_are_compared_with_what_they_repeat(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("glm-4.5"), tmp_path / "out")
    broken = copy(checkpoint("glm-4.5"), tmp_path / "broken")
    copied = "model.layers.4.embed_tokens.weight"
    put(broken, copied, lambda tensor: tensor * 2)
    assert list(odd(diff(broken, unit))) == [copied]


def test_what_the_other_layout_cannot_hold_is_no_difference(checkpoint: Make, tmp_path: Path) -> None:
    buffers = copy(checkpoint("qwen3"), tmp_path / "buffers")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(12)

    edit(buffers, DOWN, add)
    report = diff(buffers, to_megatron(buffers, tmp_path / "out"))
    assert report.equal
    assert report.count("not-held") == 1
    assert diff(buffers, checkpoint("qwen3")).exit_code == 1


def test_without_mtp(checkpoint: Make, tmp_path: Path) -> None:
    less = copy(checkpoint("glm-5"), tmp_path / "less")
    drop(less, *[name for name in names(less) if name.startswith("model.layers.4.")])
    assert diff(checkpoint("glm-5"), less).exit_code == 1
    without = SourceOptions(drop_mtp=True)
    assert diff(checkpoint("glm-5"), less, DiffOptions(without, without)).equal


def names(path: Path) -> list[str]:
    return list(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"])


def test_any_number_of_workers_finds_the_same(checkpoint: Make, tmp_path: Path) -> None:
    broken = copy(checkpoint("glm-5.2"), tmp_path / "broken")
    for layer in (2, 5, 7):
        put(broken, f"model.layers.{layer}.self_attn.q_b_proj.weight", lambda tensor: tensor * 1.5)
    found = [
        [one.to_json() for one in diff(checkpoint("glm-5.2"), broken, DiffOptions(workers=workers)).tensors]
        for workers in (1, 4)
    ]
    assert found[0] == found[1]


def test_progress_ends_at_its_total(checkpoint: Make) -> None:
    steps: list[tuple[int, int]] = []
    report = diff(
        checkpoint("qwen3"), checkpoint("qwen3"), progress=lambda s: steps.append((s.done, s.total))
    )
    assert steps[-1] == (report.bytes_read, report.bytes_read)


def test_the_config_is_told_and_no_part_of_the_verdict(checkpoint: Make, tmp_path: Path) -> None:
    other = copy(checkpoint("qwen3"), tmp_path / "other")
    configure(other, rope_theta=500000)
    report = diff(checkpoint("qwen3"), other)
    assert report.equal
    assert report.config == ["rope_theta: 1000000 in A, 500000 in B"]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        diff(tmp_path / "none", tmp_path / "none")


def test_the_command(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copy(checkpoint("qwen3"), tmp_path / "broken")
    put(broken, DOWN, lambda tensor: tensor * 2)
    same = run_cli(monkeypatch, capsys, "diff", checkpoint("qwen3"), checkpoint("qwen3"))
    assert same.code == 0
    assert "the same tensors with the same values" in same.out
    other = run_cli(monkeypatch, capsys, "diff", checkpoint("qwen3"), broken, "-j", 1)
    assert other.code == 1
    assert DOWN in other.out
    assert "they differ" in other.out
    content = json.loads(run_cli(monkeypatch, capsys, "diff", checkpoint("qwen3"), broken, "--json").out)
    assert content["counts"]["differs"] == 1
    assert content["tensors"][0]["first"] == [0, 0]
    assert run_cli(monkeypatch, capsys, "diff", tmp_path / "none", broken).code == 3
