"""Shards that the tool cuts itself: their order, and where their data begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from glmconv.basics.dtypes import DType
from glmconv.commands.convert import convert, plan_conversion
from glmconv.formats.safetensors.header import parse_header, write_header
from glmconv.plan.plan import Payload, TargetFile
from glmconv.plan.planner import TargetOptions
from tests.support.checkpoints import raw_config
from tests.support.plain import plain_of

from golden_patterns import natural_order  # isort: skip  (on the path by the line above)

SHARDS = TargetOptions("hf", max_shard_size=3_000_000)
ENTRIES = [("a", DType.BF16, (3, 5)), ("b", DType.BF16, (7,))]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven layers with matrices of some hundred kilobytes, one after the other in one file."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 11, "vocab_size": 1024}
    made = plain_of(raw_config("qwen3") | sizes)
    made.shards = 1
    made.tensors = {name: made.tensors[name] for name in sorted(made.tensors, key=natural_order)}
    return made.write(tmp_path_factory.mktemp("shards") / "hf")


def shards(source: Path) -> list[TargetFile]:
    return [t for t in plan_conversion(source, target=SHARDS).plan.targets if t.path.endswith(".safetensors")]


def congruent(payload: Payload) -> bool:
    return (payload.moves[0].src_offset - payload.offset) % 4096 == 0


def test_layers_follow_each_other_by_number(hf: Path) -> None:
    names = [payload.name for shard in shards(hf) for payload in shard.payloads]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert len(shards(hf)) > 2


def test_a_padded_header_lets_blocks_be_shared(hf: Path) -> None:
    for shard in shards(hf):
        shared = sum(payload.size for payload in shard.payloads if congruent(payload))
        assert shared > shard.size / 2


def test_the_way_round_a_torch_dist_keeps_it(hf: Path, tmp_path: Path) -> None:
    unit = convert(hf, tmp_path / "megatron").path
    payloads = [payload for shard in shards(unit) for payload in shard.payloads]
    assert sum(p.size for p in payloads if congruent(p)) > sum(p.size for p in payloads) / 2


def test_a_library_reads_padded_shards(hf: Path, tmp_path: Path) -> None:
    out = convert(hf, tmp_path / "out", target=SHARDS).path
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = load_file(hf / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("residue", [0, 8, 2048, 4088])
def test_data_begins_at_the_wanted_residue(residue: int) -> None:
    data = write_header(ENTRIES, {}, residue)
    assert len(data) % 4096 == residue
    assert len(data) < 8192
    assert [entry.name for entry in parse_header(data[8:], len(data) + 44, "").entries] == ["a", "b"]


def test_without_a_wish_the_header_is_the_librarys() -> None:
    assert len(write_header(ENTRIES, {})) % 8 == 0
    assert len(write_header(ENTRIES, {})) < 256
