"""The selection itself: the total order of keys, and top-k by a stable sort.

Order: the higher score first, then the smaller key index. -0 equals +0, +-inf are ordinary, NaN is never
selected. Shape letters: T queries, S keys, K = top_k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyscale_ref.arrays import Bool, Int32, as_count
from hyscale_ref.windows import resolve

FloatArray = NDArray[np.floating]


@dataclass(frozen=True)
class Selection:
    """The selected keys of T rows.

    indices     int32 [T, K], strictly ascending in each row, then -1
    count       int32 [T], how many keys the row selected: min(K, keys in its window that are not NaN)
    scores      [T, K] in the scores' own dtype, +0 for -0; -inf in the tail, as a softmax wants it
    nan_count   int64 [T], NaN scores inside the row's window
    bad_window  bool [T], start < 0, end > S or start > end: the row selects nothing and counts no NaN
    """

    indices: Int32
    count: Int32
    scores: FloatArray
    nan_count: NDArray[np.int64]
    bad_window: Bool


def topk(
    scores: ArrayLike, top_k: int, start: ArrayLike | None = None, end: ArrayLike | None = None
) -> Selection:
    """Select the ``top_k`` best keys of each row of ``scores`` [T, S] inside its window.

    ``start`` and ``end`` are integers [T]; with neither given the windows are causal, which needs T == S, and
    a single missing one is 0 or S. Scores keep their dtype (float16, float32 or float64), so that a kernel's
    own float32 scores are judged as they are.

    Raises TypeError or ValueError for a wrong dtype, shape or K < 1.
    """
    table = np.asarray(scores)
    if table.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(f"scores: dtype {table.dtype}; allowed: float16, float32, float64")
    if table.ndim != 2:
        raise ValueError(f"scores: shape {table.shape}; allowed: [T, S]")
    T, S = table.shape
    K = as_count("top_k", top_k, minimum=1)
    windows, bad = resolve(start, end, T, S)

    indices = np.full((T, K), -1, np.int32)
    count = np.zeros(T, np.int32)
    chosen = np.full((T, K), -np.inf, table.dtype)
    nan_count = np.zeros(T, np.int64)
    for t, (low, high) in enumerate(zip(*windows, strict=True)):
        row = table[t, low:high]
        valid = np.flatnonzero(~np.isnan(row))
        best = np.argsort(-row[valid], kind="stable")[:K]
        keys = np.sort(valid[best]) + low
        indices[t, : len(keys)] = keys
        chosen[t, : len(keys)] = table[t, keys] + 0.0  # -0 becomes +0
        count[t] = len(keys)
        nan_count[t] = len(row) - len(valid)
    return Selection(indices, count, chosen, nan_count, bad)
