"""How far gradients of selected scores may lie from the float64 reference.

Shape letters: T queries, S keys, K places of a row, H indexer heads, D indexer head size, J keys of one row.
"""

import numpy as np
from numpy.typing import NDArray

from hyscale_ref.loss import ScoreGradients, selected_score_gradients

Float64 = NDArray[np.float64]

# A product with an operand that is split in two bfloat16 terms, and its float32 sum: some 2**-16.
SPLIT_PRODUCT = 2.0**-15
# One product q . k against the sum of its magnitudes: 16-bit operands (or float32), and fp8 on Hopper.
WIDE_DOT, FP8_DOT = 2.0**-21, 2.0**-11.5
# Half a unit in the last place of what gradients are returned in, relative to them.
RETURNED = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 0.0}


def gradient_bounds(
    q: Float64,
    k: Float64,
    w: Float64,
    indices: NDArray[np.int32],
    grad: Float64,
    scale: Float64 | None,
    dtype: str,
    *,
    exact: bool = False,
    fp8_cores: bool = False,
) -> tuple[ScoreGradients, ScoreGradients]:
    """(gradients, bounds on their errors) for operands of ``dtype``, in the shapes of q, k and w.

    A bound adds up the rounding of the products, the rounding of the result, and, for every product q . k
    that may have either sign, the whole of what hangs on its relu: none if products are ``exact``, more for
    ``fp8_cores``, which keep some 14 bits of a product.
    """
    wanted = selected_score_gradients(q, k, w, indices, grad, scale)
    size = selected_score_gradients(np.abs(q), np.abs(k), np.abs(w), indices, np.abs(grad), scale)
    share = 0.0 if exact else FP8_DOT if fp8_cores else WIDE_DOT
    moved = _either_sign(q, k, w, indices, grad, scale, share)
    tiny = 2.0**-140

    def bound(part: str) -> Float64:
        returned = 0.0 if part == "w" else RETURNED[dtype]
        total: Float64 = (
            SPLIT_PRODUCT * getattr(size, part)
            + getattr(moved, part)
            + returned * np.abs(getattr(wanted, part))
            + (2.0**-24 if dtype == "fp16" and part != "w" else tiny)
        )
        return total

    return wanted, ScoreGradients(bound("q"), bound("k"), bound("w"))


def _either_sign(
    q: Float64,
    k: Float64,
    w: Float64,
    indices: NDArray[np.int32],
    grad: Float64,
    scale: Float64 | None,
    share: float,
) -> ScoreGradients:
    dq, dk, dw = np.zeros_like(q), np.zeros_like(k), np.zeros_like(w)
    for t, row in enumerate(indices):
        keys = row[row >= 0]
        c = np.abs(grad[t, row >= 0] * (1.0 if scale is None else scale[keys]))
        room = share * (np.abs(q[t]) @ np.abs(k[keys]).T)  # [H, J]
        unsure = (np.abs(q[t] @ k[keys].T) <= room) & (room > 0)
        terms = np.where(unsure, np.abs(w[t])[:, None] * c, 0.0)
        dq[t] = terms @ np.abs(k[keys])
        np.add.at(dk, keys, terms.T @ np.abs(q[t]))
        dw[t] = room @ c
    return ScoreGradients(dq, dk, dw)
