"""Indexer scores in float64: the definition that every kernel approximates.

    s[t, j] = k_scale[j] * sum_h w[t, h] * relu(q[t, h] . k[j])

Shape letters: T queries, S keys, H indexer heads, D indexer head size. Formula: DeepSeek-V3.2, "lightning
indexer"; the factors H**-0.5 and D**-0.5 and the scale of fp8 queries are part of w.
"""

import numpy as np
from numpy.typing import ArrayLike

from hyscale_ref.arrays import Float64, as_float64, as_scale, chunks


def indexer_scores(q: ArrayLike, k: ArrayLike, w: ArrayLike, k_scale: ArrayLike | None = None) -> Float64:
    """Scores float64 [T, S] of q [T, H, D], k [S, D], w [T, H] and, if given, k_scale [S].

    Inputs are float16, float32 or float64 (decode narrower formats first) and are used exactly. IEEE rules
    hold throughout: relu propagates NaN, inf * 0 and inf - inf are NaN, infinities are ordinary. A zero
    score is +0. float64 rounds too, by about (D + H) * 2**-53 of the sum of magnitudes; the bounds of
    :mod:`hyscale_ref.bounds` include that.

    Memory: the result and scratch of about 32 MiB, whatever S is.
    Raises TypeError for another dtype, ValueError for a wrong shape or a k_scale that is not
    positive and finite.
    """
    q = as_float64("q", q, ["T", "H", "D"])
    T, H, D = q.shape
    if H == 0 or D == 0:
        raise ValueError(f"q: shape {q.shape}; allowed: at least one head and one element a head")
    k = as_float64("k", k, ["S", D])
    w = as_float64("w", w, [T, H])
    S = len(k)
    scale = as_scale(k_scale, S)
    scores = np.zeros((T, S))
    with np.errstate(all="ignore"):
        for rows, keys in chunks(T, S):
            chunk = scores[rows, keys]
            for h in range(H):
                product = q[rows, h] @ k[keys].T
                np.maximum(product, 0.0, out=product)
                product *= w[rows, h, None]
                chunk += product
        scores *= scale
        scores += 0.0  # -0 becomes +0
    return scores
