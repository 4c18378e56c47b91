"""Hypothesis strategies for whole calls of a selection kernel.

``cases(regime, space)`` draws a :class:`~hyscale_verify.cases.Case`. Most are small and drawn element by
element, so that they shrink to a few keys; the others are a few hundred keys (thousands on a GPU) from one
drawn seed, so that several tiles, samples and buffers take part.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from hyscale_verify.cases import LAYOUTS, Case, rounded
from hyscale_verify.strategies.regimes import EVERY, EXACT, REGIMES, TIES, Regime, Sizes
from hyscale_verify.strategies.source import Draw, DrawnSource, SeededSource
from hyscale_verify.strategies.windows import SQUARE, draw_windows

__all__ = ["CPU", "CUDA", "EVERY", "EXACT", "REGIMES", "TIES", "Regime", "Space", "cases"]


@dataclass(frozen=True)
class Space:
    """What sizes are worth drawing on a device.

    Heads, head size and K are compile-time constants of a GPU kernel, so there a few values must do; under
    the interpreter every launch costs milliseconds, so there the arrays stay small.
    """

    dtypes: tuple[str, ...]
    heads: tuple[int, ...]
    dims: tuple[int, ...]
    odd_dims: tuple[int, ...]
    top_k: tuple[int, ...]
    most_rows: int
    most_keys: int
    most_square: int


CPU = Space(
    dtypes=("fp32", "bf16", "fp16", "fp8"),
    heads=(1, 2, 4, 8, 3),
    dims=(16, 32),
    odd_dims=(17, 24, 33),
    top_k=(1, 2, 3, 5, 8, 16, 33),
    most_rows=5,
    most_keys=260,
    most_square=20,
)
CUDA = Space(
    dtypes=("bf16", "fp16", "fp8"),
    heads=(2, 32),
    dims=(16, 128),
    odd_dims=(72,),
    top_k=(1, 3, 64, 200),
    most_rows=150,
    most_keys=6000,
    most_square=900,
)


def _sizes(draw: Draw, space: Space, regime: Regime, kind: str, small: bool) -> Sizes:
    dims = space.odd_dims if regime.odd else space.dims
    heads = draw(st.sampled_from([h for h in space.heads if h >= regime.heads]), label="H")
    D = dims[0] if small else draw(st.sampled_from(dims), label="D")
    if small:
        T, S = draw(st.integers(1, 3), label="T"), draw(st.integers(1, 8), label="S")
        K = draw(st.sampled_from([k for k in space.top_k if k <= 8]), label="K")
    else:
        T = draw(st.integers(1, space.most_rows), label="T")
        most = space.most_square if kind in SQUARE else space.most_keys
        S = draw(st.integers(1, most), label="S")
        K = draw(st.sampled_from(space.top_k), label="K")
    if regime.odd:
        T, S, heads, K = T | 1, S | 1, heads | 1, K | 1
    return Sizes(S if kind in SQUARE else T, S, heads, D, K)


@st.composite
def cases(draw: Draw, regime: str, space: Space, windows: tuple[str, ...] | None = None) -> Case:
    """One case of ``regime``, with its own window kinds or, if given, with ``windows``."""
    spec = REGIMES[regime]
    kind = draw(st.sampled_from(windows or spec.windows), label="windows")
    small = draw(st.sampled_from((True, False)), label="small")
    n = _sizes(draw, space, spec, kind, small)
    operand = draw(st.sampled_from(space.dtypes), label="dtype")
    source = DrawnSource(draw) if small else SeededSource(draw(st.integers(0, 2**32 - 1), label="seed"))
    values = spec.make(source, n, operand)
    start, end = draw_windows(draw, kind, n)
    scale = np.ones(n.S) if values.scale is None else values.scale
    return Case(
        regime=regime,
        dtype=operand,
        q=rounded(values.q, operand),
        k=rounded(values.k, operand),
        w=values.w.astype(np.float32),
        top_k=n.K,
        start=start,
        end=end,
        k_scale=scale.astype(np.float32) if operand == "fp8" else None,
        exact=spec.exact,
        layout=draw(st.sampled_from(LAYOUTS), label="layout") if spec.layouts else "contiguous",
    )
