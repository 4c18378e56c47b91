"""How far sparse latent attention may lie from float64, element by element.

A bound follows the kernel's own chain of roundings: products (``DOT`` of the sum of magnitudes), exp and sums
(``SUM``), probabilities and logit gradients rounded to the operands' dtype, results rounded to it. First
order, with constants of at most two bits of slack.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size; J used places
of one row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyscale_ref import attention
from hyscale_verify.attention.cases import AttentionCase

Float64 = NDArray[np.float64]

# Of a product, relative to the sum of magnitudes: in float32, and by tensor cores, which truncate 36 times.
DOT = {"fp32": 2.0**-20, "bf16": 2.0**-18, "fp16": 2.0**-18}
# Of exp, log and float32 sums of some thousands.
SUM = 2.0**-19
# Rounding to the operands' dtype, relative: twice half a unit in the last place.
ROUND = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Smallest absolute error: results that underflow.
TINY = {"fp32": 2.0**-120, "bf16": 2.0**-120, "fp16": 2.0**-23}


class Values(NamedTuple):
    """out [T, Hq, Dv], log_sum_exp [T, Hq], mass [T, K], and gradients of q, latent and sink (or None)."""

    out: Float64
    log_sum_exp: Float64
    mass: Float64
    q: Float64
    latent: Float64
    sink: Float64 | None


def values_and_bounds(case: AttentionCase, *, fixed_point: bool, heads: int = 64) -> tuple[Values, Values]:
    """What float64 gives, and how far from it a kernel may be.

    ``heads`` is how many heads of a row one program adds up, which the fixed-point bound depends on.
    """
    given = case.float64()
    grad = case.grad.astype(np.float64)
    wanted = attention.sparse_mla(**given)
    gradients = attention.sparse_mla_gradients(**given, grad_out=grad)
    probabilities = attention.attention_probabilities(
        given["q"], given["latent"][:, None], case.indices, case.scale, given["sink"]
    )
    exact = Values(
        wanted.out,
        wanted.log_sum_exp,
        probabilities.sum(axis=1),
        gradients.q,
        gradients.latent,
        gradients.sink,
    )
    dot, narrow, tiny = DOT[case.dtype], ROUND[case.dtype], TINY[case.dtype]
    T, Hq, _ = case.q.shape
    sink = given["sink"]
    bound = Values(
        narrow * np.abs(exact.out),
        np.zeros((T, Hq)),
        np.full(exact.mass.shape, tiny),
        narrow * np.abs(exact.q) + tiny,
        narrow * np.abs(exact.latent) + tiny,
        None if sink is None else np.full(Hq, tiny),
    )
    hits, peak = np.zeros(len(case.latent)), np.zeros(len(case.latent))
    for t in range(T):
        used = case.indices[t] >= 0
        keys = case.indices[t][used]
        if not len(keys):
            continue
        q, k, g = given["q"][t], given["latent"][keys], grad[t]
        v = k[:, : case.value_dim]
        p = probabilities[t][:, used]  # [Hq, J]
        logit = np.abs(case.scale) * (dot * np.abs(q) @ np.abs(k).T + SUM / 8 * np.abs(q @ k.T))
        spread = logit.max(axis=1)
        out_error = (2 * spread[:, None] + SUM + narrow) * (p @ np.abs(v)) + tiny
        bound.out[t] += out_error
        bound.log_sum_exp[t] = spread + SUM * (1 + np.abs(exact.log_sum_exp[t]))
        share = (2 * spread + SUM * (1 + np.abs(exact.log_sum_exp[t])))[:, None]  # of a recomputed p
        bound.mass[t][used] += (share * p).sum(axis=0)
        slope = g @ v.T
        delta = (g * exact.out[t]).sum(axis=1)
        delta_error = (np.abs(g) * bound.out[t]).sum(axis=1) + SUM * (np.abs(g) * np.abs(exact.out[t])).sum(1)
        da = case.scale * p * (slope - delta[:, None])
        slope_error = dot * np.abs(g) @ np.abs(v).T + delta_error[:, None]
        da_error = (share + narrow) * np.abs(da) + np.abs(case.scale) * p * slope_error + tiny
        bound.q[t] += (da_error + SUM * np.abs(da)) @ np.abs(k)
        p_error = (share + narrow + SUM) * p + tiny
        added = (da_error + SUM * np.abs(da)).T @ np.abs(q)
        added[:, : case.value_dim] += p_error.T @ np.abs(g)
        np.add.at(bound.latent, keys, added)
        if bound.sink is not None:
            assert sink is not None
            taken = np.exp(sink - np.logaddexp(exact.log_sum_exp[t], sink))
            bound.sink[:] += taken * (delta_error + (share[:, 0] + SUM) * np.abs(delta))
        for first in range(0, Hq, heads):
            block = slice(first, first + heads)
            reach = np.abs(da[block]).T @ np.abs(q[block]).max(axis=1)
            reach += p[block].T @ np.abs(g[block]).max(axis=1)
            np.add.at(hits, keys, 1)
            np.maximum.at(peak, keys, reach)
    if fixed_point:
        bound.latent[:] += (hits**2 * peak * 2.0**-28)[:, None]  # attention/README.md, "Fixed point"
    return exact, bound
