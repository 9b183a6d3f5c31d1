"""``check --check-dsa-indexer``: the order of index channels, exchanged by torch and not by our tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glmconv.basics.errors import UsageError
from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.commands.check import check
from glmconv.source.source import SourceOptions
from tests.support.broken import configure, copy, drop, edit, put, run_cli
from tests.support.conversions import to_hf, to_megatron

Make = Callable[..., Path]
OWNERS = [0, 1, 4, 7]
ROTATED = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
RIGHT = {"mcore": "equal", "mcore-0.18": "half-swapped", "slime": "half-swapped", "miles": "half-swapped"}
"""Order beside Hugging Face that the runtime of each dialect reads (facts: models run in fp32)."""


def exchange(tensor: Tensor) -> Tensor:
    """[rope 8 | rest 8] of each index head of 16 channels to [rest | rope]."""
    heads = tensor.unflatten(0, (-1, 16))
    return torch.cat([heads[:, 8:], heads[:, :8]], dim=1).flatten(0, 1)


def exchange_all(path: Path, layers: list[int], parts: tuple[str, ...] = ROTATED) -> None:
    for layer in layers:
        for part in parts:
            put(path, f"model.layers.{layer}.self_attn.indexer.{part}", exchange)


def look(path: Path, against: Path | None = None, **options: object) -> CheckReport:
    source = SourceOptions(**options)  # type: ignore[arg-type]
    return check(path, CheckOptions(source=source, indexer=True, against=against))


def orders(report: CheckReport) -> set[tuple[str, str]]:
    assert report.indexer is not None
    return {(one.order, one.expected) for one in report.indexer.compared}


def test_the_schedule_and_the_owners(checkpoint: Make, tmp_path: Path) -> None:
    for path in (checkpoint("glm-5.2"), to_megatron(checkpoint("glm-5.2"), tmp_path / "out", "slime")):
        report = look(path)
        found = report.indexer
        assert found is not None
        assert (found.found, found.owners) == (OWNERS, OWNERS)
        assert found.sources == {2: 1, 3: 1, 5: 4, 6: 4}
        assert (found.mtp_found, found.mtp_expected) == ([8], [8])
        assert (found.frequency, found.offset) == (3, 2)
        shapes = {part.part: (part.shapes, part.dtypes) for part in found.parts}
        assert shapes == {
            "wq_b.weight": ([[48, 36]], ["BF16"]),
            "wk.weight": ([[16, 64]], ["BF16"]),
            "k_norm.weight": ([[16]], ["BF16"]),
            "k_norm.bias": ([[16]], ["BF16"]),
            "weights_proj.weight": ([[3, 64]], ["BF16"]),
        }
        assert report.ok


def test_all_layers_own_one_without_sharing(checkpoint: Make) -> None:
    found = look(checkpoint("glm-5")).indexer
    assert found is not None
    assert (found.found, found.sources, found.mtp_found) == ([0, 1, 2, 3], {}, [4])


@pytest.mark.parametrize("dialect", RIGHT)
def test_our_own_conversions_are_right(checkpoint: Make, tmp_path: Path, dialect: str) -> None:
    hf = checkpoint("glm-5.2")
    report = look(to_megatron(hf, tmp_path / "out", dialect), hf)
    assert orders(report) == {(RIGHT[dialect], RIGHT[dialect])}
    assert report.indexer is not None
    assert len(report.indexer.compared) == 5 * 4
    assert report.ok


@pytest.mark.parametrize("dialect", RIGHT)
def test_the_other_order_is_wrong_in_every_dialect(checkpoint: Make, tmp_path: Path, dialect: str) -> None:
    """What a converter of the other dialect's habit would have written."""
    hf = checkpoint("glm-5.2")
    exchanged = copy(hf, tmp_path / "exchanged")
    exchange_all(exchanged, [*OWNERS, 8])
    report = look(to_megatron(exchanged, tmp_path / "out", dialect), hf)
    right = RIGHT[dialect]
    assert orders(report) == {("half-swapped" if right == "equal" else "equal", right)}
    assert report.exit_code == 1
    assert [finding.kind for finding in report.errors] == ["indexer-order"] * 4
    assert "layers 0, 1, 4, 7, 8" in report.errors[0].what


def test_an_exchanged_hugging_face_checkpoint(checkpoint: Make, tmp_path: Path) -> None:
    exchanged = copy(checkpoint("glm-5.2"), tmp_path / "exchanged")
    exchange_all(exchanged, [4], ("wk.weight",))
    report = look(exchanged, checkpoint("glm-5.2"))
    [found] = report.errors
    assert found.where == "indexer.wk.weight"
    assert "half-swapped beside the reference, right for hf is equal: layers 4" in found.what
    assert look(exchanged, exchanged).ok


def test_other_values_are_neither_and_the_nearer_order_is_said(checkpoint: Make, tmp_path: Path) -> None:
    hf = checkpoint("glm-5.2")
    trained = copy(hf, tmp_path / "trained")
    prefix = "model.layers.7.self_attn.indexer."
    put(trained, prefix + "wq_b.weight", lambda t: (t.float() * 1.01).to(t.dtype))
    put(
        trained,
        "model.layers.7.self_attn.indexer.wk.weight",
        lambda t: (exchange(t).float() * 1.01).to(t.dtype),
    )
    put(trained, prefix + "k_norm.weight", torch.randn_like)
    report = look(trained, hf)
    hints = {finding.where: finding.hint for finding in report.errors}
    assert "neither" in report.errors[0].what
    assert "other values in the same order" in hints["indexer.wq_b.weight"]
    assert "other values with halves exchanged" in hints["indexer.wk.weight"]
    assert "order" not in hints["indexer.k_norm.weight"].replace("half-swapped", "")


def test_halves_that_hold_the_same_fit_either_order(checkpoint: Make, tmp_path: Path) -> None:
    plain = copy(checkpoint("glm-5.2"), tmp_path / "plain")
    for layer in (*OWNERS, 8):
        put(plain, f"model.layers.{layer}.self_attn.indexer.k_norm.bias", torch.zeros_like)
    report = look(to_megatron(plain, tmp_path / "out", "slime"), plain)
    assert ("either", "half-swapped") in orders(report)
    assert report.ok


def test_a_cast_checkpoint_is_compared_after_the_same_rounding(checkpoint: Make, tmp_path: Path) -> None:
    exact = checkpoint("glm-5", dtype="float32")
    cast = to_hf(exact, tmp_path / "cast", dtype="bfloat16")
    assert look(cast, exact).ok
    assert look(to_megatron(exact, tmp_path / "out", "slime", dtype="bfloat16"), exact).ok


def test_an_owner_without_its_indexer(checkpoint: Make, tmp_path: Path) -> None:
    less = copy(checkpoint("glm-5.2"), tmp_path / "less")
    prefix = "model.layers.4.self_attn.indexer."
    drop(less, *[prefix + part for part in (*ROTATED, "weights_proj.weight")])
    report = look(less, checkpoint("glm-5.2"))
    assert report.indexer is not None
    assert report.indexer.found == [0, 1, 7]
    assert {finding.where for finding in report.errors if finding.kind == "missing"} == {
        prefix + part for part in (*ROTATED, "weights_proj.weight")
    }
    assert ("missing", "equal") in orders(report)


def test_an_indexer_on_a_sharing_layer_is_a_warning(checkpoint: Make, tmp_path: Path) -> None:
    more = copy(checkpoint("glm-5.2"), tmp_path / "more")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.self_attn.indexer.wk.weight"] = torch.ones(16, 64)

    edit(more, "model.layers.2.self_attn.q_a_proj.weight", add)
    report = look(more)
    assert report.indexer is not None
    assert report.indexer.found == OWNERS
    assert [(finding.kind, finding.severity) for finding in report.findings] == [("unused", "warning")]


def test_a_model_without_an_indexer(checkpoint: Make) -> None:
    report = look(checkpoint("qwen3"))
    assert (report.exit_code, report.findings[0].kind) == (1, "indexer")


def test_where_slime_and_miles_differ_the_dialect_must_be_said(checkpoint: Make, tmp_path: Path) -> None:
    split = copy(checkpoint("glm-5"), tmp_path / "split")
    configure(split, indexer_rope_interleave=False)
    for dialect, order in (("slime", "half-swapped"), ("miles", "equal")):
        unit = to_megatron(split, tmp_path / dialect, dialect)
        assert orders(look(unit, split)) == {(order, order)}
        (unit / "glmconv.json").unlink()
        unsaid = look(unit, split)
        assert unsaid.exit_code == 1
        assert "--dialect" in str(unsaid.findings[0])
        assert look(unit, split, dialect=dialect).ok
        other = look(unit, split, dialect="miles" if dialect == "slime" else "slime")
        assert other.exit_code == 1


def test_the_reference_must_be_a_hugging_face_checkpoint(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("glm-5"), tmp_path / "out")
    with pytest.raises(UsageError, match="--against"):
        look(checkpoint("glm-5"), unit)


def test_the_lines_that_scripts_look_for(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = checkpoint("glm-5.2")
    to_megatron(hf, tmp_path / "out", "mcore-0.18")
    command = ("check", "--model-path", tmp_path / "out", "--check-dsa-indexer")
    ran = run_cli(monkeypatch, capsys, *command, "--against", hf)
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert "DSA indexer modules found: 4" in lines
    assert "DSA indexer modules in MTP layers: 1" in lines
    assert "2-3 from 1; 5-6 from 4" in ran.out
    assert "megatron (mcore-0.18)" in ran.out
    assert ran.out.count("half-swapped │ half-swapped") == 4
    assert "WRONG" not in ran.out
    exchanged = copy(hf, tmp_path / "exchanged")
    exchange_all(exchanged, [4])
    wrong = run_cli(monkeypatch, capsys, *command, "--against", exchanged)
    assert wrong.code == 1
    assert wrong.out.count("WRONG") == 4
    content = json.loads(run_cli(monkeypatch, capsys, *command, "--against", hf, "--json").out)
    assert {part["right"] for part in content["indexer"]["compared"]} == {True}
    none = run_cli(monkeypatch, capsys, "check", checkpoint("qwen3"), "--check-dsa-indexer")
    assert none.code == 1
    assert "DSA indexer modules found: 0" in none.out.splitlines()
