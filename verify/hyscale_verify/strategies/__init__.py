"""Hypothesis strategies for whole calls of a selection kernel.

``cases(regime, space)`` draws a :class:`~hyscale_verify.cases.Case`. Most are small and drawn element by
element, so that they shrink to a few keys; the others are a few hundred keys (thousands on a GPU) from one
drawn seed, so that several tiles, samples and buffers take part.
"""

import numpy as np
from hypothesis import strategies as st

from hyscale_verify.cases import LAYOUTS, Case, rounded
from hyscale_verify.strategies.regimes import EVERY, EXACT, REGIMES, TIES, Regime, Sizes
from hyscale_verify.strategies.source import Draw, DrawnSource, SeededSource
from hyscale_verify.strategies.space import CPU, CUDA, Space
from hyscale_verify.strategies.windows import SQUARE, draw_windows

__all__ = ["CPU", "CUDA", "EVERY", "EXACT", "REGIMES", "TIES", "Regime", "Space", "cases"]


def _sizes(draw: Draw, space: Space, regime: Regime, kind: str, small: bool) -> Sizes:
    dims = space.odd_dims if regime.odd else space.dims
    heads = draw(st.sampled_from([h for h in space.heads if h >= regime.heads]), label="H")
    D = dims[0] if small else draw(st.sampled_from(dims), label="D")
    if space.fixed is not None:
        T, S, K = space.fixed
    elif small:
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
def cases(
    draw: Draw, regime: str, space: Space, windows: tuple[str, ...] | None = None, sizes: bool = False
) -> Case:
    """One case of ``regime``, with its own window kinds or, if given, with ``windows``.

    ``sizes``: half of the cases ask for small internal sizes.
    """
    spec = REGIMES[regime]
    kind = draw(st.sampled_from(windows or spec.windows), label="windows")
    small = space.fixed is None and draw(st.sampled_from((True, False)), label="small")
    n = _sizes(draw, space, spec, kind, small)
    operand = draw(st.sampled_from(space.dtypes), label="dtype")
    source = DrawnSource(draw) if small else SeededSource(draw(st.integers(0, 2**32 - 1), label="seed"))
    values = spec.make(source, n, operand)
    start, end = draw_windows(draw, kind, n)
    scale = np.ones(n.S) if values.scale is None else values.scale
    choose_sizes = sizes and draw(st.booleans(), label="choose internal sizes")
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
        sizes=draw(space.internal_sizes(n.S), label="internal sizes") if choose_sizes else None,
    )
