"""The reference of the full-size check agrees, row by row, with that of the small models."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.checkpoints import glm_moe_dsa_tensors, raw_config
from tests.support.reference import hf_to_megatron

from full_size_places import DIALECTS, markers, pieces  # isort: skip  (on the path by the line above)

CONFIG = raw_config("glm-5.2")
TENSORS = glm_moe_dsa_tensors(CONFIG)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_row_of_every_tensor_is_where_the_small_reference_has_it(dialect: str) -> None:
    state = {name: torch.randn(shape) for name, (shape, _) in TENSORS.items()}
    megatron = hf_to_megatron(dict(state), CONFIG, dialect)
    for name, (shape, _) in TENSORS.items():
        found = pieces(name, shape[0], CONFIG, dialect)
        rows = 0
        for piece in found:
            *index, row = piece.index
            stored = megatron[piece.stored][tuple(index)]
            expected = state[name][piece.first : piece.end]
            assert torch.equal(stored[row : row + piece.end - piece.first], expected), name
            rows += piece.end - piece.first
        assert rows == shape[0]


def test_markers_are_distinct_and_stay_within_a_row() -> None:
    seen = set()
    for name, (shape, dtype) in TENSORS.items():
        itemsize = 2 if dtype == "BF16" else 4
        row_bytes = math.prod(shape[1:]) * itemsize if len(shape) > 1 else shape[0] * itemsize
        for mark in markers(name, shape, itemsize):
            assert 0 < len(mark.data) <= row_bytes
            assert mark.row < shape[0]
            seen.add(mark.data)
    assert len(seen) == 2 * len(TENSORS)
