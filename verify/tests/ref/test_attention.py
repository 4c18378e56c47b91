"""Sparse attention against plain softmax written out, and its gradients against finite differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_ref.attention import (
    attention_probabilities,
    sparse_attention,
    sparse_attention_gradients,
    sparse_mla,
    sparse_mla_gradients,
)

Array = NDArray[Any]
Gradient = Callable[..., Array]


def assert_close(analytic: Array, numeric: Array) -> None:
    np.testing.assert_allclose(analytic, numeric, rtol=1e-6, atol=1e-8)


def selection(rng: np.random.Generator, T: int, S: int, K: int) -> Array:
    """Ascending indices with -1 tails; one row empty, one full."""
    indices = np.full((T, K), -1, np.int32)
    for t in range(T):
        n = [0, min(K, S)][t] if t < 2 else rng.integers(0, min(K, S) + 1)
        indices[t, :n] = np.sort(rng.choice(S, n, replace=False))
    return indices


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(4, 1), (4, 2), (4, 4)]), st.integers(1, 7), st.booleans())
def test_output_is_the_softmax_average(seed: int, heads: tuple[int, int], K: int, with_sink: bool) -> None:
    rng = np.random.default_rng(seed)
    (Hq, G), T, S, D, Dv = heads, 4, 5, 3, 2
    q, k, v = rng.standard_normal((T, Hq, D)), rng.standard_normal((S, G, D)), rng.standard_normal((S, G, Dv))
    sink = rng.standard_normal(Hq) if with_sink else None
    indices = selection(rng, T, S, K)
    got = sparse_attention(q, k, v, indices, 0.7, sink)
    p = attention_probabilities(q, k, indices, 0.7, sink)
    for t in range(T):
        keys = [j for j in indices[t] if j >= 0]
        for h in range(Hq):
            g = h // (Hq // G)
            weights = [math.exp(0.7 * float(q[t, h] @ k[j, g])) for j in keys]
            total = sum(weights) + (math.exp(sink[h]) if sink is not None else 0)
            want = sum((x / total * v[j, g] for x, j in zip(weights, keys, strict=True)), np.zeros(Dv))
            np.testing.assert_allclose(got.out[t, h], want, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(p[t, h, : len(keys)], [x / total for x in weights], rtol=1e-12)
            assert (p[t, h, len(keys) :] == 0).all()
            if keys:
                assert got.log_sum_exp[t, h] == pytest.approx(math.log(sum(weights)), rel=1e-12, abs=1e-12)
            else:
                assert got.log_sum_exp[t, h] == -math.inf


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_are_finite_differences(groups: int, with_sink: bool, numeric_gradient: Gradient) -> None:
    rng = np.random.default_rng(groups)
    T, S, Hq, D, Dv, K = 4, 6, 4, 3, 2, 4
    q, k = rng.standard_normal((T, Hq, D)), rng.standard_normal((S, groups, D))
    v, upstream = rng.standard_normal((S, groups, Dv)), rng.standard_normal((T, Hq, Dv))
    sink = rng.standard_normal(Hq) if with_sink else None
    indices = selection(rng, T, S, K)

    def loss(q: Array, k: Array, v: Array, sink: Array | None) -> float:
        return float((sparse_attention(q, k, v, indices, 0.7, sink).out * upstream).sum())

    dq, dk, dv, dsink = sparse_attention_gradients(q, k, v, indices, 0.7, upstream, sink)
    assert_close(dq, numeric_gradient(lambda x: loss(x, k, v, sink), q))
    assert_close(dk, numeric_gradient(lambda x: loss(q, x, v, sink), k))
    assert_close(dv, numeric_gradient(lambda x: loss(q, k, x, sink), v))
    if sink is None:
        assert dsink is None
    else:
        assert dsink is not None
        assert_close(dsink, numeric_gradient(lambda x: loss(q, k, v, x), sink))


def test_latent_attention_and_its_gradients(numeric_gradient: Gradient) -> None:
    rng = np.random.default_rng(0)
    T, S, Hq, D, Dv, K = 3, 6, 4, 5, 3, 4
    q, latent = rng.standard_normal((T, Hq, D)), rng.standard_normal((S, D))
    sink, upstream = rng.standard_normal(Hq), rng.standard_normal((T, Hq, Dv))
    indices = selection(rng, T, S, K)
    got = sparse_mla(q, latent, indices, 0.7, value_dim=Dv, sink=sink)
    want = sparse_attention(q, latent[:, None], latent[:, None, :Dv], indices, 0.7, sink)
    np.testing.assert_array_equal(got.out, want.out)

    def loss(q: Array, latent: Array) -> float:
        return float((sparse_mla(q, latent, indices, 0.7, value_dim=Dv, sink=sink).out * upstream).sum())

    gradients = sparse_mla_gradients(q, latent, indices, 0.7, upstream, value_dim=Dv, sink=sink)
    assert_close(gradients.q, numeric_gradient(lambda x: loss(x, latent), q))
    np.testing.assert_allclose(
        gradients.latent, numeric_gradient(lambda x: loss(q, x), latent), rtol=1e-7, atol=1e-9
    )


def test_empty_rows_give_zeros_and_no_gradient() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 2, 3)), rng.standard_normal((4, 1, 3)), rng.standard_normal((4, 1, 2))
    indices = np.full((2, 3), -1)
    assert (sparse_attention(q, k, v, indices, 1.0, np.zeros(2)).out == 0).all()
    gradients = sparse_attention_gradients(q, k, v, indices, 1.0, np.ones((2, 2, 2)), np.zeros(2))
    assert all(x is not None and (x == 0).all() for x in gradients)


def test_known_cases() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 8)), rng.standard_normal((9, 2, 8)), rng.standard_normal((9, 2, 5))
    everything = np.tile(np.arange(9), (3, 1))
    mean = sparse_attention(0 * q, k, v, everything, 1.0).out
    np.testing.assert_allclose(
        mean[0, 0], v[:, 0].mean(axis=0), rtol=1e-13, err_msg="q = 0 averages the values"
    )
    shuffled = rng.permuted(everything, axis=1)
    np.testing.assert_allclose(
        sparse_attention(q, k, v, shuffled, 1.0).out,
        sparse_attention(q, k, v, everything, 1.0).out,
        rtol=1e-13,
    )
    huge = sparse_attention(1000 * q, k, v, everything, 1.0)
    assert np.isfinite(huge.out).all(), "logits of thousands do not overflow"
    sunk = sparse_attention_gradients(q, k, v, everything, 1.0, np.ones((3, 4, 5)), np.full(4, 1000.0))
    assert all(x is not None and np.abs(x).max() < 1e-300 for x in sunk), "nor does a sink"
    wide = sparse_attention_gradients(q, k, v, everything, 1.0, np.ones((3, 4, 5)))
    np.testing.assert_allclose(wide.v.sum(axis=0), 6 * np.ones((2, 5)), rtol=1e-13, err_msg="columns of dV")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((5, 3, 8))}, "k: 3 heads; allowed: a divisor of q's 4 heads"),
        ({"k": np.zeros((5, 2, 7))}, r"k: shape \(5, 2, 7\); allowed: \[S, G, 8\]"),
        ({"v": np.zeros((4, 2, 3))}, r"v: shape \(4, 2, 3\); allowed: \[5, 2, Dv\]"),
        ({"indices": np.array([[0], [5]])}, r"indices\[1, 0\]: 5; allowed: below the 5 keys"),
        ({"sink": np.zeros(2)}, r"sink: shape \(2,\); allowed: \[4\]"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Array], message: str) -> None:
    arguments = {
        "q": np.zeros((2, 4, 8)),
        "k": np.zeros((5, 2, 8)),
        "v": np.zeros((5, 2, 3)),
        "indices": np.zeros((2, 1), int),
    }
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(arguments | change), scale=1.0)


def test_a_wrong_value_size_is_named() -> None:
    with pytest.raises(ValueError, match="value_dim: 9; allowed: 1 to the latent's size, 8"):
        sparse_mla(np.zeros((1, 2, 8)), np.zeros((3, 8)), np.zeros((1, 1), int), 1.0, value_dim=9)
