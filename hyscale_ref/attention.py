"""Attention over selected keys in float64, and its gradients: what the sparse attention kernels compute.

Query head h of row t attends to the keys j that the row selected:

    a[t, h, j] = scale * q[t, h] . k[j, g]          g = h // (Hq / G), the group of head h
    p = softmax over the selected j of a            with a sink, exp(sink[h]) joins the denominator
    out[t, h] = sum_j p[t, h, j] v[j, g]

Multi-head attention has G = Hq, grouped attention less. Multi-head latent attention in absorbed form has
G = 1 and one latent vector a position, whose leading elements are also the value: :func:`sparse_mla`. A row
that selected nothing gives zeros.

Shape letters: T queries, S keys, K places of a row's selection, Hq query heads, G key heads, D key size,
Dv value size. Selections are ``indices`` [T, K], integers, negative where a place is unused.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hyscale_ref.arrays import Float64, Int32, as_float64, as_int32


class Attention(NamedTuple):
    """out [T, Hq, Dv]; log_sum_exp [T, Hq] of a over the selected keys (the sink left out), -inf if none."""

    out: Float64
    log_sum_exp: Float64


class AttentionGradients(NamedTuple):
    """Gradients of q [T, Hq, D], k [S, G, D], v [S, G, Dv] and, if there is one, of the sink [Hq]."""

    q: Float64
    k: Float64
    v: Float64
    sink: Float64 | None


class MlaGradients(NamedTuple):
    """Gradients of q [T, Hq, D], of the latent keys [S, D] and, if there is one, of the sink [Hq]."""

    q: Float64
    latent: Float64
    sink: Float64 | None


def sparse_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, indices: ArrayLike, scale: float, sink: ArrayLike | None = None
) -> Attention:
    """Attention of q [T, Hq, D] over the selected of k [S, G, D] and v [S, G, Dv]; ``sink`` is [Hq]."""
    q, k, v, indices, sink = _checked(q, k, v, indices, sink)
    T, Hq, _ = q.shape
    out = np.zeros((T, Hq, v.shape[2]))
    log_sum_exp = np.full((T, Hq), -np.inf)
    for t in range(T):
        keys = indices[t][indices[t] >= 0]
        if len(keys):
            a, p, _ = _row(q[t], k[keys], scale, sink)
            out[t] = _heads(_groups(p, v) @ _keys(v[keys]))
            top = a.max(axis=1)
            log_sum_exp[t] = top + np.log(np.exp(a - top[:, None]).sum(axis=1))
    return Attention(out, log_sum_exp)


def sparse_attention_gradients(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    indices: ArrayLike,
    scale: float,
    grad_out: ArrayLike,
    sink: ArrayLike | None = None,
) -> AttentionGradients:
    """Gradients of sum(out * grad_out), with grad_out [T, Hq, Dv]; the log-sum-exp counts as a constant."""
    q, k, v, indices, sink = _checked(q, k, v, indices, sink)
    T, Hq, _ = q.shape
    grad_out = as_float64("grad_out", grad_out, [T, Hq, v.shape[2]])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dsink = None if sink is None else np.zeros_like(sink)
    for t in range(T):
        keys = indices[t][indices[t] >= 0]
        if not len(keys):
            continue
        _, p, p_sink = _row(q[t], k[keys], scale, sink)
        dp = _heads(_groups(grad_out[t], v) @ _keys(v[keys]).mT)
        mean = (p * dp).sum(axis=1)  # grad_out . out
        da = p * (dp - mean[:, None]) * scale
        dq[t] = _heads(_groups(da, k) @ _keys(k[keys]))
        np.add.at(dk, keys, _keys(_groups(da, k).mT @ _groups(q[t], k)))
        np.add.at(dv, keys, _keys(_groups(p, v).mT @ _groups(grad_out[t], v)))
        if dsink is not None:
            dsink -= p_sink * mean
    return AttentionGradients(dq, dk, dv, dsink)


def attention_probabilities(
    q: ArrayLike, k: ArrayLike, indices: ArrayLike, scale: float, sink: ArrayLike | None = None
) -> Float64:
    """p [T, Hq, K] at the selected keys, 0 at unused places; each head sums to 1, less the sink's share."""
    q, k, _, indices, sink = _checked(q, k, k, indices, sink)
    p = np.zeros((*q.shape[:2], indices.shape[1]))
    for t in range(len(q)):
        used = indices[t] >= 0
        if used.any():
            p[t][:, used] = _row(q[t], k[indices[t][used]], scale, sink)[1]
    return p


def sparse_mla(
    q: ArrayLike,
    latent: ArrayLike,
    indices: ArrayLike,
    scale: float,
    *,
    value_dim: int,
    sink: ArrayLike | None = None,
) -> Attention:
    """Latent attention of q [T, Hq, D] over the selected of ``latent`` [S, D], values latent[:, :value_dim].

    GLM-5.1 and DeepSeek-V3.2 have D = 576 = 512 + 64 rotary elements and value_dim = 512.
    """
    k, v = _keys_and_values(latent, value_dim)
    return sparse_attention(q, k, v, indices, scale, sink)


def sparse_mla_gradients(
    q: ArrayLike,
    latent: ArrayLike,
    indices: ArrayLike,
    scale: float,
    grad_out: ArrayLike,
    *,
    value_dim: int,
    sink: ArrayLike | None = None,
) -> MlaGradients:
    """Gradients of sum(out * grad_out) of :func:`sparse_mla`; the latent's collects key and value."""
    k, v = _keys_and_values(latent, value_dim)
    gradients = sparse_attention_gradients(q, k, v, indices, scale, grad_out, sink)
    total = gradients.k[:, 0].copy()
    total[:, :value_dim] += gradients.v[:, 0]
    return MlaGradients(gradients.q, total, gradients.sink)


def _row(q: Float64, k: Float64, scale: float, sink: Float64 | None) -> tuple[Float64, Float64, Float64]:
    """Logits [Hq, J], probabilities [Hq, J] and the sink's [Hq] of one row over J >= 1 keys [J, G, D]."""
    a = scale * _heads(_groups(q, k) @ _keys(k).mT)
    top = a.max(axis=1) if sink is None else np.maximum(a.max(axis=1), sink)
    weight = np.exp(a - top[:, None])
    extra = np.zeros(len(q)) if sink is None else np.exp(sink - top)
    total = weight.sum(axis=1) + extra
    return a, weight / total[:, None], extra / total


def _groups(x: Float64, k: Float64) -> Float64:
    """[Hq, ...] to [G, Hq / G, ...]: the heads that share each of the G heads of ``k`` [..., G, D]."""
    G = k.shape[-2]
    return x.reshape(G, len(x) // G, *x.shape[1:])


def _heads(x: Float64) -> Float64:
    """[G, Hq / G, ...] back to [Hq, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _keys(x: Float64) -> Float64:
    """[J, G, D] to [G, J, D], and back."""
    return x.swapaxes(0, 1)


def _keys_and_values(latent: ArrayLike, value_dim: int) -> tuple[Float64, Float64]:
    latent = as_float64("latent", latent, ["S", "D"])
    if not 1 <= value_dim <= latent.shape[1]:
        raise ValueError(f"value_dim: {value_dim}; allowed: 1 to the latent's size, {latent.shape[1]}")
    return latent[:, None], latent[:, None, :value_dim]


def _checked(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, indices: ArrayLike, sink: ArrayLike | None
) -> tuple[Float64, Float64, Float64, Int32, Float64 | None]:
    q = as_float64("q", q, ["T", "Hq", "D"])
    T, Hq, D = q.shape
    k = as_float64("k", k, ["S", "G", D])
    S, G, _ = k.shape
    if G == 0 or Hq % G:
        raise ValueError(f"k: {G} heads; allowed: a divisor of q's {Hq} heads")
    v = as_float64("v", v, [S, G, "Dv"])
    indices = as_int32("indices", indices, [T, "K"])
    if (indices >= S).any():
        t, place = np.argwhere(indices >= S)[0]
        raise ValueError(f"indices[{t}, {place}]: {indices[t, place]}; allowed: below the {S} keys")
    return q, k, v, indices, None if sink is None else as_float64("sink", sink, [Hq])
