"""Narrow formats against torch and NumPy casts, every bit pattern, and every rounding boundary."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hyscale_ref.formats import BF16, E4M3, FP16, FP32, Format, decode, encode, round_to

Array = NDArray[Any]


def every_pattern(fmt: Format) -> Array:
    return np.arange(2 ** (fmt.precision + fmt.exponent_bits)).astype(fmt.storage)


def torch_values(fmt: Format, bits: Array) -> Array:
    dtype = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt.name]
    signed = bits.view({1: np.uint8, 2: np.int16}[bits.itemsize])
    values: Array = torch.from_numpy(signed.copy()).view(dtype).double().numpy()
    return values


def assert_same(actual: Array, expected: Array) -> None:
    """Equal values, NaN where NaN, and the same sign everywhere, zeros included."""
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@pytest.mark.parametrize("fmt", [E4M3, BF16, FP16], ids=lambda f: f.name)
def test_every_pattern_decodes_as_in_torch(fmt: Format) -> None:
    bits = every_pattern(fmt)
    assert_same(decode(bits, fmt), torch_values(fmt, bits))


@pytest.mark.parametrize("fmt", [E4M3, BF16, FP16], ids=lambda f: f.name)
def test_every_number_survives_a_round_trip(fmt: Format) -> None:
    bits = every_pattern(fmt)
    values = decode(bits, fmt)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values[numbers], fmt), bits[numbers])
    assert np.isnan(decode(encode(values[~numbers], fmt), fmt)).all()


def boundaries(fmt: Format) -> Array:
    """Every number of the format, every midpoint of neighbours, and the float32 on both sides of each."""
    values = decode(every_pattern(fmt), fmt)
    numbers = np.unique(values[np.isfinite(values)])
    step = 2.0 ** (np.frexp(fmt.largest)[1] - fmt.precision)
    numbers = np.concatenate([[-fmt.largest - step], numbers, [fmt.largest + step]])
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    with np.errstate(over="ignore"):
        points = np.unique(points.astype(np.float32))
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e9, -1e9], np.float32)
    return np.concatenate([points, up, down, special])


def test_e4m3_rounds_as_torch_does() -> None:
    x = boundaries(E4M3)
    cast = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    saturates = decode(cast[-2:-1], E4M3)[0] == 448  # the convention of the installed torch, seen at 1e9
    np.testing.assert_array_equal(encode(x, E4M3, saturate=bool(saturates)), cast)


def test_bf16_rounds_as_torch_does() -> None:
    x = boundaries(BF16)
    cast = torch.from_numpy(x).to(torch.bfloat16).double().numpy()
    assert_same(round_to(x, BF16), np.copysign(cast, x))  # torch drops the sign of NaN
    assert_same(decode(encode(x, BF16), BF16), round_to(x, BF16))


@pytest.mark.parametrize(("fmt", "dtype"), [(FP16, np.float16), (FP32, np.float32)])
def test_ieee_formats_round_float64_as_numpy_does(fmt: Format, dtype: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**64, 200_000, np.uint64).view(np.float64)  # every exponent
    narrow = rng.standard_normal(100_000) * 2.0 ** rng.integers(-160, 140, 100_000)
    with np.errstate(over="ignore"):
        rounded = narrow.astype(dtype)
        ties = (np.nextafter(rounded, dtype(0)).astype(float) + rounded.astype(float)) / 2
    x = np.concatenate([x[~np.isnan(x)], narrow, ties[np.isfinite(ties)]])
    with np.errstate(over="ignore"):
        assert_same(round_to(x, fmt), x.astype(dtype).astype(np.float64))


def test_rounding_float64_once_differs_from_twice() -> None:
    x = 1 + 2.0**-8 + 2.0**-40  # just above a bf16 tie; float32 would make it the tie, which rounds down
    assert round_to(x, BF16) == 1 + 2.0**-7
    assert round_to(np.float32(x), BF16) == 1.0


@pytest.mark.parametrize(
    ("x", "saturated", "plain"), [(464.0, 448, 448), (464.1, 448, np.nan), (np.inf, 448, np.nan)]
)
def test_e4m3_overflow_conventions(x: float, saturated: float, plain: float) -> None:
    for sign in (1, -1):
        np.testing.assert_equal(float(round_to(sign * x, E4M3, saturate=True)), sign * saturated)
        np.testing.assert_equal(float(round_to(sign * x, E4M3)), sign * plain)


def test_format_constants() -> None:
    assert (FP32.smallest, FP32.unit_roundoff) == (2.0**-149, 2.0**-24)
    assert float(np.finfo(np.float32).max) == FP32.largest
    assert (E4M3.smallest, E4M3.unit_roundoff) == (2.0**-9, 2.0**-4)
    assert (FP16.smallest, FP16.largest) == (2.0**-24, 65504)
    assert (BF16.smallest, BF16.largest) == (2.0**-133, torch.finfo(torch.bfloat16).max)


def test_bits_of_another_size_are_refused() -> None:
    with pytest.raises(TypeError, match="bits: dtype int64; allowed for bf16: uint16"):
        decode(np.arange(3), BF16)
