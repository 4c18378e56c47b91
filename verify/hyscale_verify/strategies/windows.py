"""Window kinds of the drawn cases; built by :mod:`hyscale_ref.windows` where it has a builder."""

import numpy as np
from hypothesis import strategies as st

from hyscale_ref import windows
from hyscale_ref.windows import Windows
from hyscale_verify.strategies.regimes import Sizes
from hyscale_verify.strategies.source import Draw

KINDS = ("full", "causal", "late", "ragged", "lengths", "sliding", "packed", "zigzag")
SQUARE = ("causal", "packed", "sliding")
"""Kinds whose rows are all positions of the sequence: they need T == S."""


def draw_windows(draw: Draw, kind: str, n: Sizes) -> Windows:
    """Windows of ``n.T`` rows over ``n.S`` keys.

    full     every key
    causal   keys up to the row's own position; T == S
    late     causal, the rows being the last T of S positions (every key where T > S)
    ragged   any range a row
    lengths  rows of 0, 1, K - 1, K, K + 1 or all keys, anywhere
    sliding  causal, at most a few keys back; T == S
    packed   causal inside documents, some empty or of one key; T == S
    zigzag   T of the causal rows a context-parallel rank holds
    """
    if kind == "full":
        return windows.full(n.T, n.S)
    if kind == "causal":
        return windows.causal(n.T)
    if kind == "late":
        return windows.causal(n.T, n.S) if n.T <= n.S else windows.full(n.T, n.S)
    if kind == "sliding":
        return windows.sliding(n.T, draw(st.integers(1, n.S + 1), label="width"))
    if kind == "packed":
        cuts = draw(st.lists(st.integers(0, n.S), max_size=4), label="document boundaries")
        return windows.packed([0, *sorted(cuts), n.S])
    if kind == "zigzag":
        ranks = max(1, n.S // max(n.T, 1))
        rows = windows.zigzag_rows(n.S, ranks, draw(st.integers(0, ranks - 1), label="rank"))
        return windows.causal(n.S).rows(np.resize(rows, n.T))
    if kind == "lengths":
        allowed = sorted({min(length, n.S) for length in (0, 1, n.K - 1, n.K, n.K + 1, n.S)})
        length = draw(st.lists(st.sampled_from(allowed), min_size=n.T, max_size=n.T), label="lengths")
        start = [draw(st.integers(0, n.S - each), label="start") for each in length]
        return Windows(np.array(start, np.int32), np.array(start, np.int32) + np.array(length, np.int32))
    if kind == "ragged":
        ends = st.tuples(st.integers(0, n.S), st.integers(0, n.S))
        pairs = draw(st.lists(ends, min_size=n.T, max_size=n.T), label="windows")
        table = np.sort(np.array(pairs, np.int32).reshape(n.T, 2), axis=1)
        return Windows(table[:, 0].copy(), table[:, 1].copy())
    raise ValueError(f"kind: {kind!r}; allowed: {', '.join(KINDS)}")
