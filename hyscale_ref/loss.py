"""The indexer's training loss over the selected keys, in float64, and its gradients down to q, k and w.

The main attention's distribution over a row's selected keys, summed over heads and normalised, is the target;
the softmax of the indexer's scores at these keys is the prediction; the loss is their Kullback-Leibler
divergence (DeepSeek-V3.2, sparse training stage). The target is a constant: no gradient flows into attention.
Taken over all visible keys, the same functions give the dense warm-up loss.

Shape letters: T queries, S keys, K places of a row's selection, H indexer heads, D indexer head size, Hq
query heads. Selections are ``indices`` [T, K], integers, negative where a place is unused.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hyscale_ref.arrays import Bool, Float64, Int32, as_float64, as_int32, as_scale


class IndexerLoss(NamedTuple):
    """The loss, its rows [T] (which sum to it), and its gradient with respect to the scores [T, K]."""

    loss: float
    rows: Float64
    grad_scores: Float64


class ScoreGradients(NamedTuple):
    """Gradients of q [T, H, D], k [S, D] and w [T, H]."""

    q: Float64
    k: Float64
    w: Float64


def attention_target(probabilities: ArrayLike) -> Float64:
    """The target [T, K] of attention probabilities [T, Hq, K]: their sum over heads, made to sum to 1.

    A row without any probability (no key, or all of it on the sink) is zero.
    """
    p = as_float64("probabilities", probabilities, ["T", "Hq", "K"])
    if (p < 0).any():
        raise ValueError(f"probabilities: {p.min()}; allowed: >= 0")
    total = p.sum(axis=1)
    whole = total.sum(axis=1, keepdims=True)
    target: Float64 = np.divide(total, whole, out=np.zeros_like(total), where=whole > 0)
    return target


def indexer_loss(
    target: ArrayLike,
    scores: ArrayLike,
    indices: ArrayLike,
    *,
    coefficient: float = 1.0,
    temperature: float = 1.0,
) -> IndexerLoss:
    """coefficient * sum over rows of KL(target || softmax(scores / temperature)) over the selected keys.

    ``target`` and ``scores`` are [T, K]; what they hold at unused places is ignored. Rows with no key, or
    whose target is zero, give 0; so do rows with one key. The sum runs over rows, so that parts of a sequence
    add up; divide the coefficient by the number of rows for a mean.
    """
    target = as_float64("target", target, ["T", "K"])
    scores = as_float64("scores", scores, target.shape)
    used = as_int32("indices", indices, target.shape) >= 0
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature}; allowed: > 0")
    target = np.where(used, target, 0.0)
    used = used & (target.sum(axis=1, keepdims=True) > 0)
    log_p = _log_softmax(scores / temperature, used)
    log_ratio = np.log(target, out=np.zeros_like(target), where=target > 0) - log_p
    rows = coefficient * np.where(target > 0, target * log_ratio, 0.0).sum(axis=1)
    share = target.sum(axis=1, keepdims=True)
    grad = coefficient / temperature * np.where(used, np.exp(log_p) * share - target, 0.0)
    return IndexerLoss(float(rows.sum()), rows, grad)


def selected_scores(
    q: ArrayLike, k: ArrayLike, w: ArrayLike, indices: ArrayLike, k_scale: ArrayLike | None = None
) -> Float64:
    """Indexer scores [T, K] at the selected keys, 0 at unused places; see :mod:`hyscale_ref.scores`."""
    q, k, w, indices, scale = _checked(q, k, w, indices, k_scale)
    scores = np.zeros(indices.shape)
    for t in range(len(q)):
        used = indices[t] >= 0
        keys = indices[t][used]
        scores[t, used] = scale[keys] * (w[t] @ np.maximum(q[t] @ k[keys].T, 0.0))
    return scores + 0.0


def selected_score_gradients(
    q: ArrayLike,
    k: ArrayLike,
    w: ArrayLike,
    indices: ArrayLike,
    grad_scores: ArrayLike,
    k_scale: ArrayLike | None = None,
) -> ScoreGradients:
    """Gradients of sum(scores * grad_scores) at the selected keys, with grad_scores [T, K].

    relu has the gradient 0 at 0. The gradients are those of the arguments as given; for fp8 inputs divide by
    a scale to get those of the dequantised values (k by ``k_scale``, q by the scale folded into w).
    """
    q, k, w, indices, scale = _checked(q, k, w, indices, k_scale)
    grad_scores = as_float64("grad_scores", grad_scores, indices.shape)
    dq, dk, dw = np.zeros_like(q), np.zeros_like(k), np.zeros_like(w)
    for t in range(len(q)):
        used = indices[t] >= 0
        keys = indices[t][used]
        upstream = grad_scores[t, used] * scale[keys]
        dots = q[t] @ k[keys].T  # [H, J]
        dw[t] = np.maximum(dots, 0.0) @ upstream
        ddots = np.where(dots > 0, w[t][:, None] * upstream, 0.0)
        dq[t] = ddots @ k[keys]
        np.add.at(dk, keys, ddots.T @ q[t])
    return ScoreGradients(dq, dk, dw)


def _log_softmax(scores: Float64, used: Bool) -> Float64:
    """log softmax over the used places of each row; 0 elsewhere."""
    masked = np.where(used, scores, -np.inf)
    top = np.max(masked, axis=1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    total = np.where(used, np.exp(masked - top), 0.0).sum(axis=1, keepdims=True)
    log_total = np.log(total, out=np.zeros_like(total), where=total > 0)
    return np.where(used, scores - top - log_total, 0.0)


def _checked(
    q: ArrayLike, k: ArrayLike, w: ArrayLike, indices: ArrayLike, k_scale: ArrayLike | None
) -> tuple[Float64, Float64, Float64, Int32, Float64]:
    q = as_float64("q", q, ["T", "H", "D"])
    T, H, D = q.shape
    k = as_float64("k", k, ["S", D])
    w = as_float64("w", w, [T, H])
    indices = as_int32("indices", indices, [T, "K"])
    if (indices >= len(k)).any():
        t, place = np.argwhere(indices >= len(k))[0]
        raise ValueError(f"indices[{t}, {place}]: {indices[t, place]}; allowed: below the {len(k)} keys")
    return q, k, w, indices, as_scale(k_scale, len(k))
