"""Narrow floating-point formats, exactly: rounding to them, and their bits.

NumPy lacks bfloat16 and fp8 e4m3, and a result that passed through float32 has been rounded twice. Here a
float64 is rounded once, to nearest with ties to even, by arithmetic alone; every value of every format below
is a float64, so decoding is exact.

e4m3 is the "fn" variant of the OCP 8-bit floating point specification (2023): no infinities, one NaN pattern
for each sign, largest value 448. Beyond it there are two conventions: saturate to 448 (infinities too), as
the hardware conversion and torch 2.13 do, or give NaN from the rounding boundary 464 on, as earlier torch
releases do. :func:`encode` and :func:`round_to` offer both.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyscale_ref.arrays import Float64

UnsignedBits = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Format:
    """A binary format: sign, ``exponent_bits``, and ``precision`` - 1 stored fraction bits."""

    name: str
    precision: int  # significant bits of a normal number, the hidden one included
    exponent_bits: int
    largest: float
    has_infinity: bool = True

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, 2.0**min_exponent."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a number in the normal range: 2**-precision."""
        return 2.0**-self.precision

    @property
    def smallest(self) -> float:
        """Smallest positive (subnormal) number."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def storage(self) -> type[np.unsignedinteger]:
        """Unsigned integer type that holds one number's bits."""
        types: dict[int, type[np.unsignedinteger]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
        return types[self.precision + self.exponent_bits]


E4M3 = Format("e4m3", precision=4, exponent_bits=4, largest=448.0, has_infinity=False)
BF16 = Format("bf16", precision=8, exponent_bits=8, largest=(2 - 2.0**-7) * 2.0**127)
FP16 = Format("fp16", precision=11, exponent_bits=5, largest=65504.0)
FP32 = Format("fp32", precision=24, exponent_bits=8, largest=(2 - 2.0**-23) * 2.0**127)


def round_to(values: ArrayLike, fmt: Format, *, saturate: bool = False) -> Float64:
    """``values`` rounded once to ``fmt`` (nearest, ties to even), as float64.

    Results beyond ``fmt.largest`` become infinite (NaN where the format has no infinity) or, with
    ``saturate``, the largest number of that sign, infinities included. NaN stays NaN; -0 stays -0.
    """
    x = np.asarray(values, dtype=np.float64)
    quantum = _binade(x, fmt) + fmt.min_exponent - fmt.precision + 1
    with np.errstate(over="ignore"):
        rounded: Float64 = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    beyond = np.abs(rounded) > fmt.largest
    overflow = fmt.largest if saturate else np.inf if fmt.has_infinity else np.nan
    return np.where(beyond, np.copysign(overflow, x), rounded)


def encode(values: ArrayLike, fmt: Format, *, saturate: bool = False) -> UnsignedBits:
    """The bits of ``values`` rounded by :func:`round_to`, in ``fmt.storage``; NaN keeps its sign."""
    x = round_to(values, fmt, saturate=saturate)
    fraction_bits = fmt.precision - 1
    number = np.where(np.isfinite(x), x, 0.0)
    binade = _binade(number, fmt)
    integer = np.ldexp(np.abs(number), fraction_bits - fmt.min_exponent - binade).astype(np.int64)
    magnitude = (
        binade.astype(np.int64) << fraction_bits
    ) + integer  # the hidden bit carries into the exponent
    infinity = (2**fmt.exponent_bits - 1) << fraction_bits
    nan = infinity + (2 ** (fraction_bits - 1) if fmt.has_infinity else 2**fraction_bits - 1)
    magnitude = np.where(np.isinf(x), infinity, np.where(np.isnan(x), nan, magnitude))
    sign = np.signbit(x).astype(np.int64) << (fmt.exponent_bits + fraction_bits)
    bits: UnsignedBits = (sign | magnitude).astype(fmt.storage)
    return bits


def decode(bits: ArrayLike, fmt: Format) -> Float64:
    """The exact values of stored ``bits`` (an array of ``fmt.storage``); TypeError for another dtype."""
    stored = np.asarray(bits)
    if stored.dtype != fmt.storage:
        raise TypeError(f"bits: dtype {stored.dtype}; allowed for {fmt.name}: {np.dtype(fmt.storage)}")
    fraction_bits = fmt.precision - 1
    word = stored.astype(np.int64)
    fraction = word & (2**fraction_bits - 1)
    top = 2**fmt.exponent_bits - 1
    biased = (word >> fraction_bits) & top
    quantum = np.maximum(biased, 1) + fmt.min_exponent - 1 - fraction_bits
    value = np.ldexp((fraction + np.where(biased > 0, 2**fraction_bits, 0)).astype(np.float64), quantum)
    if fmt.has_infinity:
        value = np.where(biased == top, np.where(fraction == 0, np.inf, np.nan), value)
    else:
        value = np.where((biased == top) & (fraction == 2**fraction_bits - 1), np.nan, value)
    sign = word >> (fmt.exponent_bits + fraction_bits)
    return np.copysign(value, np.where(sign == 1, -1.0, 1.0))


def _binade(x: Float64, fmt: Format) -> NDArray[np.intc]:
    """How many binades |x| lies above the lowest normal one of ``fmt``; 0 for subnormals and zero."""
    _, exponent = np.frexp(x)  # |x| = m * 2**exponent, 0.5 <= m < 1
    above: NDArray[np.intc] = np.where(x == 0, 0, np.maximum(exponent - 1 - fmt.min_exponent, 0))
    return above
