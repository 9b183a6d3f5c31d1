"""Casts round once, to nearest, ties to even; NaN stays NaN; overflow is an error."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from glmconv.basics.dtypes import DType
from glmconv.basics.errors import DataError
from glmconv.engine.casts import cast_block
from glmconv.engine.rounding import CastOverflow, Rounding

TORCH = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}
FLOATS = tuple(TORCH)
WIDENING = [(DType.BF16, DType.F32), (DType.BF16, DType.F64), (DType.F16, DType.F32), (DType.F16, DType.F64)]


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def cast(data: bytes, source: DType, target: DType) -> torch.Tensor:
    out = cast_block(memoryview(data), source, target)
    return torch.from_numpy(out.copy()).view(TORCH[target])


def every_16_bit_value(dtype: DType) -> bytes:
    return np.arange(1 << 16, dtype=np.uint16).tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit (so -0 is not 0), any NaN like any other."""
    both_nan = left.isnan() & right.isnan()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return bool((both_nan | (left.view(bits) == right.view(bits))).all())


@pytest.mark.parametrize(("source", "target"), WIDENING)
def test_widening_is_exact_for_every_value(source: DType, target: DType) -> None:
    data = every_16_bit_value(source)
    expected = torch.frombuffer(bytearray(data), dtype=TORCH[source]).to(TORCH[target])
    assert same(cast(data, source, target), expected)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in WIDENING] + [(DType.F32, DType.F64)])
def test_there_and_back_is_the_identity(source: DType, target: DType) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    data = bits.tobytes() if source is DType.F32 else every_16_bit_value(source)
    tensor = torch.frombuffer(bytearray(data), dtype=TORCH[source])
    there = to_bytes(cast(data, source, target))
    assert same(cast(there, target, source), tensor)


def near_ties(target: DType) -> torch.Tensor:
    """F32 values on, just below and just above the middle of two neighbours of the target type."""
    low = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(TORCH[target]).to(torch.float32)
    low = low[low.isfinite() & (low.abs() < 60_000)]
    step = torch.from_numpy(np.arange(1, (1 << 16) + 1, dtype=np.uint32).astype(np.uint16)).view(
        TORCH[target]
    )
    high = step.to(torch.float32)[: len(low)]
    middle = (low + high) / 2
    around = [middle, torch.nextafter(middle, low), torch.nextafter(middle, high), low]
    values = torch.cat(around)
    return values[values.isfinite() & (values.abs() < 60_000)]


@pytest.mark.parametrize("target", [DType.BF16, DType.F16])
def test_narrowing_f32_rounds_to_nearest_even(target: DType) -> None:
    rng = np.random.default_rng(1)
    spread = rng.standard_normal(200_000) * 10.0 ** rng.integers(-12, 4, 200_000)
    random = torch.from_numpy(np.clip(spread, -60_000, 60_000).astype(np.float32))
    values = torch.cat([random, near_ties(target), torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan])])
    assert same(cast(to_bytes(values), DType.F32, target), values.to(TORCH[target]))


@pytest.mark.parametrize("target", [DType.BF16, DType.F16, DType.F32])
def test_narrowing_f64_rounds_once(target: DType) -> None:
    """A middle moved by less than F32 can tell must not be rounded to a tie first."""
    ones = torch.tensor([1.0, 1.5, 3.0, -2.0, 2.0**-130, 1e-41], dtype=torch.float64)
    ulp = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.F32: 2.0**-23}[target]
    values = torch.cat(
        [ones * (1 + ulp * half) * (1 + 2.0**-50 * nudge) for half, nudge in product((0.5, 1.5), (-1, 0, 1))]
    )
    got = cast(to_bytes(values), DType.F64, target).to(torch.float64)
    neighbours = values.to(torch.float32).to(TORCH[target])
    candidates = torch.stack(
        [torch.nextafter(neighbours, torch.full_like(neighbours, limit)) for limit in (-np.inf, np.inf)]
        + [neighbours]
    ).to(torch.float64)
    for value, result, near in zip(values.tolist(), got.tolist(), candidates.T.tolist(), strict=True):
        best = min(abs(Fraction(value) - Fraction(c)) for c in near)
        assert abs(Fraction(value) - Fraction(result)) == best


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        (DType.F32, DType.F16, 65_520.0),
        (DType.F32, DType.BF16, 3.4e38),
        (DType.BF16, DType.F16, -1e5),
        (DType.F64, DType.F32, 1e39),
        (DType.F64, DType.BF16, -3.4e38),
        (DType.F64, DType.F16, 7e4),
    ],
)
def test_overflow_is_an_error(source: DType, target: DType, value: float) -> None:
    data = torch.tensor([1.0, value], dtype=torch.float64).to(TORCH[source])
    with pytest.raises(DataError, match=f"does not fit {target.label}"):
        cast(to_bytes(data), source, target)


NARROWING = [
    (DType.F32, DType.F16),
    (DType.F32, DType.BF16),
    (DType.BF16, DType.F16),
    (DType.F16, DType.BF16),
    (DType.F64, DType.F32),
    (DType.F64, DType.F16),
    (DType.F64, DType.BF16),
]


@pytest.mark.parametrize(("source", "target"), NARROWING)
def test_what_underflows_is_counted(source: DType, target: DType) -> None:
    """Against torch: values around the least normal and the least of all numbers, both signs, zeros, NaN."""
    exponents = torch.arange(-180, 4, dtype=torch.float64)
    values = torch.cat([sign * mantissa * 2**exponents for sign in (1, -1) for mantissa in (1.0, 1.25, 1.75)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, np.inf, np.nan, 1.0], dtype=torch.float64)])
    values = values.to(TORCH[source])
    rounded = values.to(TORCH[target]).to(torch.float64)
    smallest = torch.finfo(TORCH[target]).smallest_normal
    tally = Rounding()
    cast_block(memoryview(to_bytes(values)), source, target, tally)
    assert tally.to_zero == int(((values != 0) & (rounded == 0)).sum())
    assert tally.to_subnormal == int(((rounded != 0) & (rounded.abs() < smallest)).sum())
    assert (tally.to_zero > 0) == (source is not DType.F16)


@pytest.mark.parametrize(("source", "target"), [*WIDENING, (DType.F32, DType.F64)])
def test_a_widening_cast_loses_nothing(source: DType, target: DType) -> None:
    tally = Rounding()
    values = torch.tensor([1e-40, -1e-7, 0.0, 1.0], dtype=torch.float64).to(TORCH[source])
    cast_block(memoryview(to_bytes(values)), source, target, tally)
    assert tally == Rounding()


def test_an_overflow_tells_how_many_values_and_the_largest() -> None:
    values = torch.tensor([7e4, 1.0, -9e8, np.inf, np.nan, 65_504.0])
    with pytest.raises(CastOverflow) as caught:
        cast(to_bytes(values), DType.F32, DType.F16)
    assert (caught.value.count, caught.value.largest) == (2, 9e8)


@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in product(FLOATS, FLOATS) if pair[0] != pair[1]]
)
def test_infinities_and_nan_pass(source: DType, target: DType) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=TORCH[source])
    got = cast(to_bytes(values), source, target)
    assert got[0] == float("inf")
    assert got[1] == float("-inf")
    assert got[2].isnan()


def test_every_f32_nan_stays_nan_in_bf16() -> None:
    """Payloads in the low half, and all ones, are those that a careless rounding loses."""
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF], dtype=np.uint32)
    got = cast(bits.tobytes(), DType.F32, DType.BF16)
    assert bool(got.isnan().all())
    assert torch.equal(torch.signbit(got.to(torch.float32)), torch.tensor([False, False, True, True, False]))


def test_only_plain_floats_are_cast() -> None:
    with pytest.raises(DataError, match="only plain floats"):
        cast_block(memoryview(b"1234"), DType.F8_E4M3, DType.BF16)
