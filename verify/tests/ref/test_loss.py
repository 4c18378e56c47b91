"""The indexer loss and the gradients of selected scores, against sums written out and finite differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_ref.attention import attention_probabilities
from hyscale_ref.loss import attention_target, indexer_loss, selected_score_gradients, selected_scores
from hyscale_ref.scores import indexer_scores

Array = NDArray[Any]
Gradient = Callable[..., Array]


def assert_close(analytic: Array, numeric: Array) -> None:
    np.testing.assert_allclose(analytic, numeric, rtol=1e-6, atol=1e-8)


def problem(seed: int) -> tuple[Array, Array, Array]:
    """(target, scores, indices) of rows with 0, 1, some and all of 5 places in use; junk in the others."""
    rng = np.random.default_rng(seed)
    indices = np.full((5, 5), -1)
    for t, n in enumerate([0, 1, 2, 5, 3]):
        indices[t, :n] = np.sort(rng.choice(9, n, replace=False))
    p = rng.random((5, 3, 5)) * (indices >= 0)[:, None]
    p[4, :, 0] = 0  # a key that no head attends to
    scores = rng.standard_normal((5, 5)) * 3
    return attention_target(p), np.where(indices >= 0, scores, np.nan), indices


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.1, 3), st.floats(0.1, 5))
def test_loss_is_the_divergence_and_its_gradient(
    numeric_gradient: Gradient, seed: int, coefficient: float, temperature: float
) -> None:
    target, scores, indices = problem(seed)
    keywords = {"coefficient": coefficient, "temperature": temperature}
    got = indexer_loss(target, scores, indices, **keywords)
    for t in range(5):
        used = indices[t] >= 0
        weights = np.exp(scores[t, used] / temperature)
        prediction = weights / weights.sum()
        want = sum(
            float(a) * math.log(a / b) for a, b in zip(target[t, used], prediction, strict=True) if a > 0
        )
        assert got.rows[t] == pytest.approx(coefficient * want, rel=1e-10, abs=1e-12)
        assert got.rows[t] >= -1e-15
    assert got.loss == pytest.approx(got.rows.sum())
    assert (got.grad_scores[indices < 0] == 0).all()
    assert (got.rows[:2] == 0).all(), "no key, and one key"
    assert (got.grad_scores[:2] == 0).all()
    filled = np.where(indices >= 0, scores, 0)
    numeric = numeric_gradient(lambda x: indexer_loss(target, x, indices, **keywords).loss, filled)
    np.testing.assert_allclose(got.grad_scores, numeric, rtol=1e-5, atol=1e-7)


def test_a_perfect_prediction_has_no_loss() -> None:
    target, _, indices = problem(0)
    used = (indices >= 0) & (target > 0)
    scores = np.log(target, out=np.full_like(target, -800.0), where=used)
    got = indexer_loss(target, scores, indices)
    assert got.loss == pytest.approx(0, abs=1e-12)
    assert np.abs(got.grad_scores).max() < 1e-12


def test_large_scores_do_not_overflow() -> None:
    got = indexer_loss([[0.5, 0.5]], [[1000.0, -1000.0]], [[0, 1]])
    assert got.loss == pytest.approx(1000 - math.log(2))
    np.testing.assert_allclose(got.grad_scores, [[0.5, -0.5]])


def test_a_row_without_attention_counts_for_nothing() -> None:
    """All of the attention of row 0 is on the sink."""
    q, k = np.zeros((2, 1, 2)), np.zeros((2, 1, 2))
    indices = np.array([[0, 1], [0, 1]])
    target = attention_target(attention_probabilities(q, k, indices, 1.0, np.array([800.0])))
    assert (target == 0).all()
    got = indexer_loss(target, np.array([[1.0, 2.0], [3.0, 4.0]]), indices)
    assert got.loss == 0
    assert (got.grad_scores == 0).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_selected_scores_are_the_scores_at_the_indices(scaled: bool, numeric_gradient: Gradient) -> None:
    rng = np.random.default_rng(0)
    q, k, w = rng.standard_normal((4, 3, 5)), rng.standard_normal((7, 5)), rng.standard_normal((4, 3))
    k_scale = rng.random(7) + 0.5 if scaled else None
    indices = np.array([[0, 3, 6], [2, -1, -1], [-1, -1, -1], [1, 2, 3]])
    got = selected_scores(q, k, w, indices, k_scale)
    dense = indexer_scores(q, k, w, k_scale)
    want = np.where(indices >= 0, np.take_along_axis(dense, np.maximum(indices, 0), axis=1), 0)
    np.testing.assert_allclose(got, want, rtol=1e-13)

    upstream = rng.standard_normal(indices.shape)

    def loss(q: Array, k: Array, w: Array) -> float:
        return float((selected_scores(q, k, w, indices, k_scale) * upstream).sum())

    dq, dk, dw = selected_score_gradients(q, k, w, indices, upstream, k_scale)
    assert_close(dq, numeric_gradient(lambda x: loss(x, k, w), q))
    assert_close(dk, numeric_gradient(lambda x: loss(q, x, w), k))
    assert_close(dw, numeric_gradient(lambda x: loss(q, k, x), w))


def test_relu_has_no_gradient_at_zero() -> None:
    q, k, w = np.array([[[1.0, 0.0]]]), np.array([[0.0, 1.0]]), np.ones((1, 1))
    gradients = selected_score_gradients(q, k, w, [[0]], [[1.0]])
    assert all((x == 0).all() for x in gradients)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_target(-np.ones((1, 1, 1))), r"probabilities: -1\.0; allowed: >= 0"),
        (lambda: indexer_loss(np.ones((1, 2)), np.ones((1, 3)), [[0, 1]]), r"scores: shape \(1, 3\)"),
        (lambda: indexer_loss(np.ones((1, 2)), np.ones((1, 2)), [[0]]), r"indices: shape \(1, 1\)"),
        (
            lambda: indexer_loss(np.ones((1, 1)), np.ones((1, 1)), [[0]], temperature=0),
            "temperature: 0; allowed: > 0",
        ),
        (
            lambda: selected_scores(np.ones((1, 1, 1)), np.ones((2, 1)), np.ones((1, 1)), [[2]]),
            r"indices\[0, 0\]: 2; allowed: below the 2 keys",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
