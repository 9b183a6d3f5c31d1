"""``check --hash`` reads every byte again and names what changed since it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glmconv.basics.errors import UsageError
from glmconv.checks.findings import CheckOptions, CheckReport
from glmconv.commands.check import check
from tests.support.broken import flip, shard_of, tensor_of
from tests.support.conversions import to_hf, to_megatron

Make = Callable[..., Path]
HASHES = CheckOptions(hashes=True)


def kinds(report: CheckReport) -> set[str]:
    return {finding.kind for finding in report.errors}


def texts(report: CheckReport) -> str:
    return "\n".join(map(str, report.findings))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5.2", "qwen3"])
def test_any_flipped_byte_is_found_and_named(checkpoint: Make, tmp_path: Path, model: str) -> None:
    unit = to_megatron(checkpoint(model), tmp_path / "out", padded_vocab=512)
    files = [path for path in sorted(unit.rglob("*")) if path.is_file() and path.name != "glmconv.json"]
    assert {"common.pt", ".metadata", "metadata.json", "__0_0.distcp"} <= {file.name for file in files}
    for file in files:
        size = file.stat().st_size
        for offset in {0, size // 3, size // 2, size - 1}:
            flip(file, offset)
            report = check(unit, HASHES)
            named = [finding for finding in report.errors if file.name in f"{finding.where} {finding.what}"]
            assert named, (file.name, offset, texts(report))
            assert report.exit_code == 1
            flip(file, offset)
    assert check(unit, HASHES).ok


def test_a_flipped_weight_names_its_tensor(checkpoint: Make, tmp_path: Path) -> None:
    back = to_hf(to_megatron(checkpoint("qwen3"), tmp_path / "out"), tmp_path / "back")
    name = "model.layers.2.mlp.up_proj.weight"
    file = shard_of(back, name)
    flip(file, file.read_bytes().index(tensor_of(back, name).view(torch.uint8).numpy().tobytes()) + 1000)
    found = [str(finding) for finding in check(back, HASHES).errors]
    assert len(found) == 1
    assert name in found[0]


def test_files_that_went_and_came(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    (unit / "hf" / "tokenizer.json").unlink()
    (unit / "core.1234").write_bytes(b"x")
    (unit / "metadata.json").write_bytes(b"{}")
    report = check(unit, HASHES)
    assert kinds(report) == {"missing-file", "size"}
    assert [finding.kind for finding in report.warnings] == ["extra-file"]


def test_without_a_manifest_it_is_a_mistake_in_use(checkpoint: Make) -> None:
    with pytest.raises(UsageError, match=r"glmconv\.json"):
        check(checkpoint("qwen3"), HASHES)


def test_a_manifest_that_leads_outside(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    content = json.loads((unit / "glmconv.json").read_text())
    content["files"][0]["path"] = "../../secret"
    (unit / "glmconv.json").write_text(json.dumps(content))
    report = check(unit, HASHES)
    assert report.exit_code == 1
    assert "not a path inside" in texts(report)


def test_one_worker_or_many(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("glm-5.2"), tmp_path / "out")
    found = [check(unit, CheckOptions(hashes=True, workers=workers)) for workers in (1, 5)]
    assert found[0].hashes == found[1].hashes
    assert found[0].bytes_read == found[1].bytes_read


def test_a_damaged_metadata_does_not_accuse_the_tensors(checkpoint: Make, tmp_path: Path) -> None:
    unit = to_megatron(checkpoint("qwen3"), tmp_path / "out")
    flip(unit / ".metadata", 0)
    hashed = [finding for finding in check(unit, HASHES).errors if finding.kind == "hash"]
    assert [finding.where for finding in hashed] == [".metadata"]
