r"""How far a computed indexer score can be from its float64 value: rigorous bounds, entry by entry.

A kernel computes, of inputs it takes exactly,

    d[h] = q[t, h] . k[j]            a dot product of D terms in the arithmetic of a tensor core or of float32
    s    = k_scale[j] * sum_h w[t, h] * relu(d[h])      in float32, round to nearest

Write u = 2**-24, gamma(n) = n u / (1 - n u), A[h] = sum_i |q_i k_i|.

1. *The dot product in float32*, in any order, with or without fused multiply-adds: every term passes through
   at most D roundings, so |d^ - d| <= gamma(D) A (Higham, Accuracy and Stability of Numerical Algorithms,
   2nd ed., section 3.1). Products of bf16, fp16 and e4m3 operands are exact in float32; the bound does not
   rely on it.

2. *The dot product on a tensor core.* The hardware does not round each operation. One step adds the products
   of ``block`` consecutive elements to the accumulator c: all are aligned to the largest exponent, what lies
   ``alignment_bits`` below it is cut off, the rest is summed exactly, and the sum is cut to ``result_bits``
   fraction bits. (Fasi, Higham, Mikaitis and Pranesh, PeerJ CS 7:e330, 2021, for V100 to A100; Khattak and
   Mikaitis, arXiv 2512.07004, for H100 and B200; the DeepSeek-V3 report, section 3.5.2, and DeepGEMM issues
   37, 50 and 176 for fp8 on Hopper.) With m >= every |product| and every exact partial sum, and e the error:
   a cut loses less than 2**-alignment_bits (m + e), there are at most D + B of them in B = ceil(D / block)
   steps, and B results lose at most 2**-result_bits (m + e) each. Hence

       e <= kappa (m + e)  so  e <= kappa m / (1 - kappa),
       kappa = (D + B) 2**-alignment_bits + B 2**-result_bits.

   Let P and N be the sums of the positive and of the negative parts of the B exact block sums. Any set of
   blocks sums to at most max(P, N), so m = max(P, N, max|q| max|k|) serves whatever the order of the blocks;
   and a step that takes several blocks at once only lowers P and N. Partial results added in float32 (split
   D) are covered too: each such rounding is smaller than the accumulator cut that it replaces.

3. *relu* is exact and moves two numbers no further apart. With e = |d^ - d| bounded: if d + e <= 0 the
   computed value is exactly 0; else the error is at most e + min(d, 0).

4. *The sum over heads*, in any order, fused or not: at most H roundings a term, so it adds
   gamma(H) sum_h |w[h]| (relu(d[h]) + e[h]) to the propagated sum_h |w[h]| e[h]. Heads that surely give
   nothing (3., or w = 0, or A = 0) add nothing: a plateau of exact zeros has the bound 0.

5. *k_scale* is one more rounding.

6. *Underflow.* Each operation may lose up to tau = 2**-126 more, and so may each operand that is flushed to
   zero; the terms with tau below cover gradual underflow and flush-to-zero alike.

7. *Overflow.* Where an intermediate could reach the largest float32, or an input is infinite, the bound is
   infinite. Where an input is NaN the score is surely NaN, and its bound is 0.

float64's own rounding, of the score and of the bound, is added.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hyscale_ref.arrays import Float64, as_float64, as_scale, chunks
from hyscale_ref.formats import FP32

TAU = 2.0**FP32.min_exponent


@dataclass(frozen=True)
class Float32:
    """float32, rounded to nearest after each operation, in any order, fused or not (1. above)."""

    def dot(self, q: Float64, k: Float64) -> tuple[Float64, Float64]:
        """Dot products [R, C] of the rows of q [R, D] and k [C, D], and a bound on their error."""
        return q @ k.T, gamma(q.shape[1]) * (np.abs(q) @ np.abs(k).T)


@dataclass(frozen=True)
class TensorCore:
    """Aligned and truncated accumulation of ``block`` products a step (2. above)."""

    block: int
    alignment_bits: int
    result_bits: int

    def dot(self, q: Float64, k: Float64) -> tuple[Float64, Float64]:
        """Dot products [R, C] of the rows of q [R, D] and k [C, D], and a bound on their error."""
        D = q.shape[1]
        steps = -(-D // self.block)
        kappa = (D + steps) * 2.0**-self.alignment_bits + steps * 2.0**-self.result_bits
        if kappa > 0.5:
            raise ValueError(f"q: head size {D}; {self} has no useful bound beyond kappa = 1/2")
        positive = np.zeros((len(q), len(k)))
        negative = np.zeros((len(q), len(k)))
        for i in range(0, D, self.block):
            part = q[:, i : i + self.block] @ k[:, i : i + self.block].T
            positive += np.maximum(part, 0)
            negative += np.maximum(-part, 0)
        product = np.abs(q).max(axis=1)[:, None] * np.abs(k).max(axis=1)
        largest = np.maximum(np.maximum(positive, negative), product)
        return positive - negative, kappa / (1 - kappa) * largest


Arithmetic = Float32 | TensorCore

FLOAT32 = Float32()

# bf16 and fp16, accumulated in float32. Steps of 8 (A100), 16 (H100) or more elements; A100 aligns with one
# bit and H100 with two bits beyond float32's 23, none of which is relied upon. Also covers fp8 widened to
# fp16 (mma.sync on Hopper) and fp8 on B200, whose accumulator keeps 25 bits.
TENSOR_CORE_16BIT = TensorCore(block=8, alignment_bits=23, result_bits=23)

# fp8 through Hopper's wgmma: 32 elements a step, an accumulator of 13 fraction bits ("about 14 bits"). On
# random normal data this model, simulated, errs by up to 2**-12.0 of A; so does an H200.
HOPPER_E4M3 = TensorCore(block=32, alignment_bits=13, result_bits=13)


class BoundedScores(NamedTuple):
    """Scores in float64 [T, S] and, entry by entry, how far a computed score may be from them."""

    scores: Float64
    bound: Float64


def gamma(n: int) -> float:
    """n u / (1 - n u) for float32's unit roundoff u: the relative error of n roundings."""
    return n * FP32.unit_roundoff / (1 - n * FP32.unit_roundoff)


def bounded_scores(
    q: ArrayLike, k: ArrayLike, w: ArrayLike, k_scale: ArrayLike | None = None, *, arithmetic: Arithmetic
) -> BoundedScores:
    """Scores of q [T, H, D], k [S, D], w [T, H], k_scale [S] and the bound that ``arithmetic`` gives them.

    The inputs are what the kernel is given (decoded, so exact). The scores equal
    :func:`hyscale_ref.scores.indexer_scores` but for float64 rounding, which the bound includes. Bounds are
    >= 0, infinite where nothing can be promised, and 0 for a score that is NaN whatever the arithmetic.
    Raises TypeError or ValueError for a wrong dtype or shape.
    """
    q = as_float64("q", q, ["T", "H", "D"])
    T, H, D = q.shape
    k = as_float64("k", k, ["S", D])
    w = as_float64("w", w, [T, H])
    S = len(k)
    scale = as_scale(k_scale, S)
    scores = np.zeros((T, S))
    bound = np.zeros((T, S))
    if H == 0 or D == 0:
        raise ValueError(f"q: shape {q.shape}; allowed: at least one head and one element a head")
    with np.errstate(all="ignore"):
        for rows, keys in chunks(T, S):
            scores[rows, keys], bound[rows, keys] = _chunk(
                q[rows], k[keys], w[rows], None if k_scale is None else scale[keys], arithmetic
            )
        bound[~np.isfinite(bound)] = np.inf
    bound[np.isnan(q).any(axis=(1, 2)) | np.isnan(w).any(axis=1)] = 0
    bound[:, np.isnan(k).any(axis=1)] = 0
    return BoundedScores(scores, bound)


def _chunk(
    q: Float64, k: Float64, w: Float64, scale: Float64 | None, arithmetic: Arithmetic
) -> tuple[Float64, Float64]:
    """Scores and bounds [R, C] of R rows and C keys."""
    R, H, D = q.shape
    score = np.zeros((R, len(k)))
    error = np.zeros_like(score)  # sum_h |w| e, with the underflow of live heads
    size = np.zeros_like(score)  # sum_h |w| (relu(d) + e)
    magnitude = np.zeros_like(score)  # sum_h |w| A, for float64's own rounding
    largest = np.zeros_like(score)  # the largest intermediate
    anything = np.zeros(score.shape, np.bool_)
    k_peak = np.abs(k).max(axis=1)
    slack = (D + H + 8) * 2.0**-52
    for h in range(H):
        weight = w[:, h, None]
        absolute = np.abs(q[:, h]) @ np.abs(k).T
        d, e = arithmetic.dot(q[:, h], k)
        e += D * TAU * (2 + np.abs(q[:, h]).max(axis=1)[:, None] + k_peak) + slack * absolute
        relu = np.maximum(d, 0)
        live = ~((d + e <= 0) | (weight == 0) | (absolute == 0))
        e = np.where(live, np.maximum(e + np.minimum(d, 0), 0), 0)
        score += weight * relu
        error += np.abs(weight) * e + 2 * TAU * live * (2 + relu + e + np.abs(weight))
        size += np.abs(weight) * (relu + e)
        magnitude += np.where(live, np.abs(weight) * absolute, 0)
        largest = np.maximum(largest, absolute)
        anything |= live
    error += gamma(H) * size
    largest = np.maximum(largest, size)
    if scale is not None:
        error = scale * error * (1 + 2**-23) + scale * np.abs(score) * 2.0**-24
        error += anything * TAU * (1 + scale + size)
        score = score * scale
        magnitude = magnitude * scale
        largest = np.maximum(largest, size * scale)
    error = (error + slack * magnitude) * (1 + slack)
    error[~(largest * (1 + gamma(D + H)) < FP32.largest)] = np.inf
    return score + 0.0, error
