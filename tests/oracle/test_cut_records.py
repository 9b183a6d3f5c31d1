"""Records cut by rows load in torch and in megatron-core: real models, with the limit set low."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from glmconv.engine import execute, unit_dir
from glmconv.formats.torchdist.metadata import parse_metadata
from glmconv.plan.draft import DtypePolicy
from glmconv.plan.plan import Plan, plan_digest
from glmconv.plan.to_torch_dist import draft_torch_dist
from glmconv.source.open import open_source
from glmconv.source.source import SourceOptions
from glmconv.tables.expand import megatron_layout, stacks_layers
from glmconv.tables.rules import DIALECTS
from tests.support import convert_jobs, mcore_run, torchdist_jobs
from tests.support.big_checkpoints import EMBEDDING, mark_rows, marker, sparse_qwen3
from tests.support.conversions import (
    assert_same_bytes,
    differing_tensors,
    read_torch_dist,
    to_hf,
    to_megatron,
)

MODELS = {
    "0.16.1": ("glm-5", "glm-4.5", "qwen3", "qwen3-moe"),
    "0.19.2": ("glm-5.2", "glm-4.5", "qwen3", "qwen3-moe"),
}
DIALECT = {"0.16.1": "mcore-0.18", "0.19.2": "mcore"}
LIMIT = 3000
"""Bytes: of the small models' matrices few fit, and no row is larger."""
NOISE = 2e-5


def cut_megatron(
    hf: Path, root: Path, dialect: str, limit: int, *, stacked: bool = False, padded: int | None = None
) -> Path:
    """A torch_dist whose records stay below ``limit`` bytes; the unit's directory."""
    source = open_source(hf, SourceOptions())
    layout = megatron_layout(
        source.table, source.spec, dialect, stacked or stacks_layers(source.table, source.spec, dialect)
    )
    draft = draft_torch_dist(
        source, layout, DtypePolicy(to_megatron=True), padded_vocab=padded, max_payload=limit
    )
    assert not draft.defects
    plan = Plan(draft.sources, draft.targets, [*source.equal], source.dropped)
    plan.digest = plan_digest(plan)
    root.mkdir(parents=True)
    execute(plan, root)
    return unit_dir(root)


def chunk_bytes(unit: Path) -> list[int]:
    """Payload bytes of every record of the unit."""
    tensors = parse_metadata((unit / ".metadata").read_bytes(), str(unit)).tensors.values()
    return [prod(chunk.sizes) * entry.dtype.itemsize for entry in tensors for chunk in entry.chunks]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("model", ["glm-5.2", "glm-4.5-air", "qwen3-moe", "qwen3-untied"])
def test_torch_reads_the_same_tensors_however_they_are_cut(
    checkpoint: Callable[..., Path], tmp_path: Path, model: str, dialect: str
) -> None:
    hf = checkpoint(model)
    whole = to_megatron(hf, tmp_path / "whole", dialect, padded_vocab=401)
    cut = cut_megatron(hf, tmp_path / "cut", dialect, LIMIT, padded=401)
    assert len(chunk_bytes(cut)) > len(chunk_bytes(whole))
    assert max(chunk_bytes(cut)) < LIMIT < max(chunk_bytes(whole))
    assert differing_tensors(read_torch_dist(cut), read_torch_dist(whole)) == []
    options = SourceOptions(dialect=dialect)
    assert_same_bytes(
        to_hf(cut, tmp_path / "a", source=options), to_hf(whole, tmp_path / "b", source=options)
    )


@pytest.mark.parametrize("lane", MODELS)
def test_megatron_core_loads_cut_records_and_agrees(
    checkpoint: Callable[..., Path], tmp_path: Path, lane: str
) -> None:
    units = {}
    for model in MODELS[lane]:
        hf = checkpoint(model, dtype="float32")
        convert_jobs.write_case(hf, tmp_path / f"{model}.pt")
        units[model] = str(cut_megatron(hf, tmp_path / model, DIALECT[lane], LIMIT))
    arguments: dict[str, Any] = {"cases": str(tmp_path), "units": units, "parallel": [1, 1, 1]}
    for found in mcore_run.run(convert_jobs.load_converted, lane=lane, arguments=arguments)[0].values():
        assert found["missing"] == found["differing"] == []
        assert max(found["parity"].values()) <= NOISE
    two = {model: unit for model, unit in units.items() if model in ("glm-5", "glm-5.2", "qwen3")}
    arguments |= {"units": two, "parallel": [2, 1, 1]}
    for rank in mcore_run.run(convert_jobs.load_converted, lane=lane, world=2, arguments=arguments):
        assert [found["missing"] for found in rank.values()] == [[], []]
        for found in rank.values():
            assert max(found["parity"].values(), default=0.0) <= NOISE


@pytest.mark.parametrize("lane", MODELS)
def test_a_tensor_parallel_rank_reads_across_the_cut_of_a_real_embedding(tmp_path: Path, lane: str) -> None:
    """Kimi K2's in fp32, 4.7 GB, cut at row 81920; rank 2 of 5 holds rows 65536 to 98303."""
    vocab, hidden, rows = 163_840, 7168, [65_536, 81_919, 81_920, 98_303]
    hf = sparse_qwen3(tmp_path / "hf", vocab, hidden)
    mark_rows(hf, EMBEDDING, rows)
    unit = to_megatron(hf, tmp_path / "m")
    arguments = {
        "unit": str(unit),
        "key": "embedding.word_embeddings.weight",
        "shape": [vocab // 5, hidden],
        "fragment": [2, 5],
        "rows": [row - 65_536 for row in rows],
    }
    found = mcore_run.run(torchdist_jobs.load_fragment, lane=lane, arguments=arguments)[0]
    assert found["values"] == [[marker(row, 0), 0.0, marker(row, hidden - 1)] for row in rows]
    assert found["nonzero"] == 2 * len(rows)
