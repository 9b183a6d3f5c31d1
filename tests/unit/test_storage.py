"""The seam of storages: a plan whose sources lie nowhere on this machine is carried out like any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError, StorageError
from glmconv.engine import execute, hash_range, space_needed, unit_dir
from glmconv.engine.conditions import check_conditions
from glmconv.plan.plan import Plan, plan_digest
from glmconv.source.locate import Located, Piece
from glmconv.storage.objects import StorageObject
from glmconv.storage.opened import STORAGES, OpenObjects
from glmconv.tables.expand import HfTensor
from glmconv.values.reader import Reader
from tests.support.engine_plans import expected_files, mixed_plan, read_tree
from tests.support.memory_storage import NAME, MemoryStorage


@dataclass
class Afar:
    """A plan whose sources were carried into memory, and what it has to write."""

    plan: Plan
    storage: MemoryStorage
    expected: dict[str, bytes]
    data: dict[str, bytes]


@pytest.fixture
def afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Afar:
    plan = mixed_plan(tmp_path)
    expected, storage = expected_files(plan), MemoryStorage()
    monkeypatch.setitem(STORAGES, NAME, storage)
    data = {}
    for number, source in enumerate(plan.sources):
        path = Path(source.address)
        address = f"memory://{path.name}"
        data[address] = path.read_bytes()
        plan.sources[number] = storage.put(address, data[address])
        path.unlink()
    plan.digest = plan_digest(plan)
    return Afar(plan, storage, expected, data)


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.mark.parametrize("workers", [1, 3])
def test_a_plan_is_carried_out_from_objects_without_a_descriptor(
    afar: Afar, staging: Path, workers: int
) -> None:
    check_conditions(afar.plan)
    assert space_needed(afar.plan, staging, "auto") >= sum(map(len, afar.expected.values()))
    outcome = execute(afar.plan, staging, workers=workers)
    assert read_tree(unit_dir(staging)) == afar.expected
    assert outcome.bytes_cloned == 0
    assert afar.storage.open_now == 0


def test_clone_mode_says_that_there_is_nothing_to_clone(afar: Afar, staging: Path) -> None:
    with pytest.raises(StorageError, match="lies on no filesystem of this machine") as caught:
        execute(afar.plan, staging, copy_mode="clone")
    assert "--copy-mode auto" in caught.value.hint


def test_another_revision_is_refused(afar: Afar, staging: Path) -> None:
    address = afar.plan.sources[0].address
    afar.storage.put(address, afar.data[address])
    with pytest.raises(DataError, match="another revision"):
        execute(afar.plan, staging)


def test_an_unfinished_run_is_not_continued_from_another_revision(afar: Afar, staging: Path) -> None:
    execute(afar.plan, staging)
    address = afar.plan.sources[0].address
    afar.plan.sources[0] = afar.storage.put(address, afar.data[address])
    afar.plan.digest = plan_digest(afar.plan)
    with pytest.raises(DataError, match=f"the revision of {address} differs"):
        execute(afar.plan, staging)


def test_values_and_hashes_are_read_from_any_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    monkeypatch.setitem(STORAGES, NAME, storage)
    bits = np.arange(60_000, dtype=np.uint16).reshape(200, 300)
    held = storage.put("memory://one", bits.tobytes())
    located = Located(HfTensor("x", (200, 300)), DType.BF16, (Piece(0, 0, 0, 0, 200, 300, 600),))
    with Reader([held]) as reader:
        assert np.array_equal(reader.whole(located), bits)
        assert hash_range(reader.object(0), 7, 90_000) == xxhash.xxh3_128(bits.tobytes()[7:90_007]).digest()
    assert storage.open_now == 0


def test_the_identity_names_each_of_its_values() -> None:
    one = StorageObject("memory://one", 5, (("revision", 3),), "digest", NAME)
    assert one.identity == ["memory://one", 5, 3, "digest"]
    assert one.named_identity == {"path": "memory://one", "size": 5, "revision": 3, "header": "digest"}


def test_few_objects_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    monkeypatch.setitem(STORAGES, NAME, storage)
    objects = OpenObjects([storage.put(f"memory://{i}", bytes(1)) for i in range(9)], limit=3)
    for number in (*range(9), 8):
        objects.get(number)
    assert storage.open_now == 3
    objects.close()
    assert storage.open_now == 0
