"""Families of scores, each built to expose a kind of error that random normal inputs let live.

Every regime fills q [T, H, D], k [S, D], w [T, H] and, for fp8, k_scale [S]. Scores are designed through a
few *features*: leading coordinates of q and k that are not zero, so that s = sum_h w relu(q . k) can be read
off. A regime is *exact* when every product and partial sum is exact in float32 in any order, and
sum |q . k| < 2**13, which the narrow fp8 accumulator of Hopper tensor cores holds exactly as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyscale_verify.strategies.source import Source

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """The sizes of one case: T queries, S keys, H heads of size D, K selected."""

    T: int
    S: int
    H: int
    D: int
    K: int


@dataclass(frozen=True)
class Values:
    """Unrounded inputs; ``scale`` multiplies the scores key by key (used as k_scale for fp8 alone)."""

    q: Float64
    k: Float64
    w: Float64
    scale: Float64 | None = None


Maker = Callable[[Source, Sizes, str], Values]


@dataclass(frozen=True)
class Regime:
    """A named family of inputs.

    make     fills the arrays
    words    one line: what it is for
    exact    the oracle's float64 scores are the kernel's float32 scores, bit for bit
    ties     equal scores at the cut are the normal case
    windows  the window kinds it is drawn with (see :mod:`hyscale_verify.strategies.windows`)
    layouts  whether q and k also come in other memory layouts
    heads    fewest heads it needs
    odd      sizes are odd rather than round
    """

    name: str
    make: Maker
    words: str
    exact: bool = False
    ties: bool = False
    windows: tuple[str, ...] = ("full", "late", "ragged", "sliding")
    layouts: bool = False
    heads: int = 1
    odd: bool = False


def _embed(features: Float64, D: int) -> Float64:
    """[..., r] features as the leading coordinates of [..., D] zeros."""
    out = np.zeros((*features.shape[:-1], D))
    out[..., : features.shape[-1]] = features
    return out


def exact_integers(source: Source, n: Sizes, dtype: str) -> Values:
    return Values(
        q=source.integers((n.T, n.H, n.D), -3, 3),
        k=source.integers((n.S, n.D), -3, 3),
        w=source.integers((n.T, n.H), -4, 4),
        scale=source.choice((1.0, 2.0, 0.5), (n.S,)) if dtype == "fp8" else None,
    )


def tie_rich(source: Source, n: Sizes, dtype: str) -> Values:
    return Values(
        q=_embed(source.integers((n.T, n.H, 2), -1, 1), n.D),
        k=_embed(source.integers((n.S, 2), -1, 1), n.D),
        w=source.choice((1.0, 2.0, -1.0), (n.T, n.H)),
    )


def relu_plateau(source: Source, n: Sizes, dtype: str) -> Values:
    return Values(
        q=_embed(source.choice((1.0, 2.0), (n.T, n.H, 1)), n.D),
        k=_embed(source.choice((-1.0, -2.0, -3.0, 0.0, -1.0, 2.0), (n.S, 1)), n.D),
        w=source.choice((1.0, 2.0), (n.T, n.H)),
    )


LEAST = 2.0**-149
"""The smallest positive float32: times 1/4 it is rounded to zero, and keeps its sign."""


def signed_zero(source: Source, n: Sizes, dtype: str) -> Values:
    """Zeros of both signs in one row: relu's zeros beside negative products too small for float32."""
    return Values(
        q=_embed(source.choice((1.0, -1.0), (n.T, n.H, 1)), n.D),
        k=_embed(source.choice((0.25, -0.25, 0.0, 1.0), (n.S, 1)), n.D),
        w=np.broadcast_to(source.choice((-LEAST, -LEAST, -1.0, 1.0), (n.T, 1)), (n.T, n.H)).copy(),
    )


def ulp_neighbours(source: Source, n: Sizes, dtype: str) -> Values:
    """Scores +-(1 + m 2**-23) 2**e with m in 0..15: float32 neighbours.

    Head 0 gives the one and head 1 the m, so the dot products stay small integers in every format.
    """
    q = np.zeros((n.T, n.H, n.D))
    q[:, 0, 0] = 1.0
    q[:, 1, 1] = 1.0
    w = np.zeros((n.T, n.H))
    w[:, 0] = np.exp2(source.integers((n.T,), -3, 3)) * source.choice((1.0, -1.0), (n.T,))
    w[:, 1] = w[:, 0] * 2.0**-23
    k = np.zeros((n.S, n.D))
    k[:, 0] = 1.0
    k[:, 1] = source.integers((n.S,), 0, 15)
    return Values(q, k, w)


EXPONENTS = {"fp8": (-6, 8), "fp16": (-14, 14), "bf16": (-40, 40), "fp32": (-40, 40)}
"""Powers of two that each format holds, with room for products."""


def wide_range(source: Source, n: Sizes, dtype: str) -> Values:
    low, high = EXPONENTS[dtype]
    return Values(
        q=_embed(np.exp2(source.integers((n.T, n.H, 2), low // 2, high // 2)), n.D),
        k=_embed(np.exp2(source.integers((n.S, 2), low, high)) * source.choice((1.0, -1.0), (n.S, 2)), n.D),
        w=np.exp2(source.integers((n.T, n.H), -8, 8)) * source.choice((1.0, -1.0), (n.T, n.H)),
    )


def infinities(source: Source, n: Sizes, dtype: str) -> Values:
    """+-inf by overflow of w relu(q . k) in any format, and by infinite keys where the format has them."""
    values = tie_rich(source, n, dtype)
    huge = source.choice((1.0, 3e38, -3e38), (n.T, 1))
    k = values.k.copy()
    if dtype != "fp8":
        k[:, 0] += source.choice((0.0, 0.0, 0.0, np.inf, -np.inf), (n.S,))
    q = values.q.copy()
    q[:, :, 0] = 2.0  # never 0 against an infinite key, so that infinities survive as such
    return Values(q, k, np.where(huge == 1.0, values.w, huge))


def nan(source: Source, n: Sizes, dtype: str) -> Values:
    values = tie_rich(source, n, dtype)
    k = values.k + 0.0
    k[:, 0] += source.choice((0.0, 0.0, np.nan), (n.S,))
    w = values.w + source.choice((0.0, 0.0, 0.0, np.nan), (n.T, 1))
    return Values(values.q, k, w)


def _from_levels(level: NDArray[np.int64], n: Sizes, source: Source) -> Values:
    """Scores w * level[j] for levels in [0, 512): three base-8 digits, exact in every format."""
    digits = np.stack([level // 64, level // 8 % 8, level % 8], axis=-1).astype(np.float64)
    q = np.zeros((n.T, n.H, n.D))
    q[:, :, :3] = (64.0, 8.0, 1.0)
    return Values(q, _embed(digits, n.D), source.choice((1.0, 2.0), (n.T, n.H)))


def _ramp(n: Sizes) -> NDArray[np.int64]:
    """0, 1, 2, ... over the keys; beyond 512 keys the steps get runs of equal keys."""
    return np.arange(n.S) // -(-max(n.S, 1) // 512)


def ascending(source: Source, n: Sizes, dtype: str) -> Values:
    return _from_levels(_ramp(n), n, source)


def descending(source: Source, n: Sizes, dtype: str) -> Values:
    return _from_levels(_ramp(n)[::-1].copy(), n, source)


STRIDES = (2, 4, 8, 16, 32, 64)


def periodic(source: Source, n: Sizes, dtype: str) -> Values:
    """Two levels that alternate with a period a strided sample could share: it sees one level only."""
    stride = int(source.choice(STRIDES, (1,))[0])
    phase = int(source.integers((1,), 0, stride - 1)[0])
    high_at_phase = bool(source.integers((1,), 0, 1)[0])
    at_phase = np.arange(n.S) % stride == phase
    noise = source.integers((n.S,), 0, 3).astype(np.int64)
    return _from_levels(np.where(at_phase == high_at_phase, 300, 20) + noise, n, source)


def spike(source: Source, n: Sizes, dtype: str) -> Values:
    level = np.full(n.S, 7)
    if n.S:
        level[int(source.integers((1,), 0, n.S - 1)[0])] = 500
    return _from_levels(level, n, source)


def constant(source: Source, n: Sizes, dtype: str) -> Values:
    return _from_levels(np.full(n.S, int(source.integers((1,), 0, 3)[0])), n, source)


def duplicated_keys(source: Source, n: Sizes, dtype: str) -> Values:
    """Each key is a copy of one of four random ones: ties whose scores are not exact."""
    distinct = source.normal((4, n.D))
    copy_of = source.integers((n.S,), 0, 3).astype(np.int64)
    scale = np.abs(source.normal((4,)))[copy_of] + 0.5 if dtype == "fp8" else None
    return Values(source.normal((n.T, n.H, n.D)), distinct[copy_of], source.normal((n.T, n.H)), scale)


def random_normal(source: Source, n: Sizes, dtype: str) -> Values:
    return Values(
        q=source.normal((n.T, n.H, n.D)),
        k=source.normal((n.S, n.D)),
        w=source.normal((n.T, n.H)),
        scale=np.abs(source.normal((n.S,))) + 0.125 if dtype == "fp8" else None,
    )


def documents(source: Source, n: Sizes, dtype: str) -> Values:
    """Runs of adjacent keys near one direction each; all rows want one run, not the first, by most heads.

    Without noise the keys of a document are equal. Scales differ from document to document. A key of
    any place may be what is wanted most.
    """
    count = 2 + min(n.S // 150, 14)
    direction = source.normal((count, n.D))
    document = np.searchsorted(np.sort(source.integers((count - 1,), 0, n.S)), np.arange(n.S), "right")
    noise = source.choice((0.0, 0.03125, 0.125), (1,))[0]
    wanted = int(source.integers((1,), 1, count - 1)[0])
    k = direction[document] + noise * source.normal((n.S, n.D))
    if n.S:
        k[int(source.integers((1,), 0, n.S - 1)[0])] += source.choice((3.0, 0.0), (1,)) * direction[wanted]
    w = source.choice((1.0, 0.5, 2.0, -0.5, 0.0), (n.T, n.H))
    w[:, 0] = np.abs(w[:, 0]) + 1
    return Values(
        q=direction[wanted] + noise * source.normal((n.T, n.H, n.D)),
        k=k,
        w=w,
        scale=source.choice((1.0, 2.0**-6, 2.0**6), (count,))[document] if dtype == "fp8" else None,
    )


_OF_FLOAT32 = (-30, -100, 40, 60, 100)
MAGNITUDES = {"fp8": (0, -3, -6), "fp16": (-3, -14, 8), "bf16": _OF_FLOAT32, "fp32": _OF_FLOAT32}
"""Powers of two by which the keys of a format go to the ends of its range, and part of the way."""


def spoiled_documents(source: Source, n: Sizes, dtype: str) -> Values:
    """Documents that a bound may trip over: odd keys, an odd weight, or all keys or weights of odd size.

    An odd key is a multiple of what the rows want, or has a coordinate that is NaN, infinite or huge.
    """
    values = documents(source, n, dtype)
    k, w, scale = values.k + 0.0, values.w + 0.0, values.scale
    odd = int(source.choice((0, 1, 0, 1, 2, 3), (1,))[0])
    if odd == 0:
        for j in source.integers((2,), 0, n.S - 1).astype(int) if n.S else ():
            spoil = source.choice((8.0, 0.0, np.nan, np.inf, -np.inf, 1e30), (1,))[0]
            if spoil == 8.0 and n.T:
                k[j] = spoil * values.q[0, 0]
            else:
                k[j, 0] = spoil
    elif odd == 1 and w.size:
        at = int(source.integers((1,), 0, w.size - 1)[0])
        w.flat[at] = source.choice((-1e10, np.nan, 1e30, np.nan, np.inf, -np.inf, -1e30), (1,))[0]
    elif odd == 2:
        k *= np.exp2(source.choice(MAGNITUDES[dtype], (1,)))
    else:
        w *= source.choice((1e-9, 1e-30, 1e9, 1e18, 1e30), (1,))
        if scale is not None:
            scale = scale * source.choice((1.0, 1e-9, 1e-30, 1e9, 1e18), (1,))
    return Values(values.q, k, w, scale)


REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("exact_integers", exact_integers, "small integers in every coordinate", exact=True),
        Regime("tie_rich", tie_rich, "a handful of distinct scores", exact=True, ties=True),
        Regime("relu_plateau", relu_plateau, "most scores are relu's zero", exact=True, ties=True),
        Regime("signed_zero", signed_zero, "zeros of both signs", ties=True),
        Regime("ulp_neighbours", ulp_neighbours, "scores one float32 step apart", exact=True, heads=2),
        Regime("wide_range", wide_range, "scores from tiny to huge, both signs"),
        Regime("infinities", infinities, "infinite scores, some NaN"),
        Regime("nan", nan, "NaN in keys and weights"),
        Regime("sorted", ascending, "scores rise with the key index", exact=True),
        Regime("reversed", descending, "scores fall with the key index", exact=True),
        Regime("periodic", periodic, "two levels, periodic at a sample stride", exact=True, ties=True),
        Regime("spike", spike, "one high score among equals", exact=True, ties=True),
        Regime("constant", constant, "all keys equal", exact=True, ties=True),
        Regime("duplicated_keys", duplicated_keys, "copies of four random keys", ties=True),
        Regime("random_normal", random_normal, "normal random numbers"),
        Regime("documents", documents, "runs of similar keys, of which one run is wanted"),
        Regime("spoiled_documents", spoiled_documents, "such runs with odd keys, or of extreme sizes"),
        Regime("row_lengths", tie_rich, "rows of 0, 1, K-1, K, K+1 keys", True, True, ("lengths",)),
        Regime("packed_windows", tie_rich, "packed documents", True, True, ("packed",)),
        Regime("rank_splits", tie_rich, "rows of a context-parallel rank", True, True, ("zigzag", "late")),
        Regime("odd_sizes", exact_integers, "no size is round", True, odd=True),
        Regime("strided_storage", exact_integers, "q and k are views of larger memory", True, layouts=True),
    )
}

EXACT = tuple(name for name, regime in REGIMES.items() if regime.exact)
TIES = tuple(name for name, regime in REGIMES.items() if regime.ties)
EVERY = tuple(REGIMES)
