"""The float64 indexer scores against exact rational arithmetic and IEEE's special values."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hyscale_ref.arrays
from hyscale_ref.scores import indexer_scores

Array = NDArray[Any]


def exact_score(q: Array, k: Array, w: Array, scale: float, t: int, j: int) -> Fraction:
    """One score in rational arithmetic: no rounding at all."""
    total = Fraction(0)
    for h in range(q.shape[1]):
        dot = sum(
            (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(q[t, h], k[j], strict=True)), Fraction(0)
        )
        total += Fraction(float(w[t, h])) * max(dot, Fraction(0))
    return total * Fraction(scale)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_integers_give_the_exact_score(seed: int, T: int, S: int, H: int, D: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.integers(-3, 4, (T, H, D)).astype(np.float32)
    k = rng.integers(-3, 4, (S, D)).astype(np.float32)
    w = rng.integers(-3, 4, (T, H)).astype(np.float32)
    scale = 2.0 ** rng.integers(-3, 4, S)
    scores = indexer_scores(q, k, w, scale)
    assert scores.shape == (T, S)
    for t in range(T):
        for j in range(S):
            assert scores[t, j] == exact_score(q, k, w, float(scale[j]), t, j)
    assert not np.signbit(scores[scores == 0]).any(), "a zero score must be +0"


def test_normal_inputs_are_within_float64_rounding_of_the_exact_score() -> None:
    rng = np.random.default_rng(0)
    q, k, w = rng.standard_normal((3, 4, 16)), rng.standard_normal((5, 16)), rng.standard_normal((3, 4))
    scores = indexer_scores(q, k, w)
    for t in range(3):
        for j in range(5):
            magnitude = float(np.abs(w[t]) @ (np.abs(q[t]) @ np.abs(k[j])))
            error = abs(Fraction(scores[t, j]) - exact_score(q, k, w, 1.0, t, j))
            assert error <= 30 * 2.0**-53 * magnitude


def test_chunks_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    q, k, w = (rng.integers(-8, 9, shape).astype(float) for shape in [(7, 3, 8), (11, 8), (7, 3)])
    whole = indexer_scores(q, k, w)
    monkeypatch.setattr(hyscale_ref.arrays, "CHUNK_BYTES", 8 * 64 * 4)  # 4 keys by 64 rows
    np.testing.assert_array_equal(indexer_scores(q, k, w), whole)
    monkeypatch.setattr(hyscale_ref.arrays, "CHUNK_BYTES", 8 * 2)  # 1 key by 2 rows
    np.testing.assert_array_equal(indexer_scores(q, k, w), whole)


@pytest.mark.parametrize(
    ("q", "k", "w", "expected"),
    [
        ([[np.nan], [1.0]], [1.0], [0.0, 1.0], np.nan),  # relu propagates NaN, and 0 * NaN is NaN
        ([[-np.inf], [1.0]], [1.0], [1.0, 1.0], 1.0),  # relu(-inf) is 0
        ([[np.inf], [1.0]], [1.0], [1.0, 1.0], np.inf),
        ([[np.inf], [1.0]], [1.0], [-1.0, 1.0], -np.inf),
        ([[np.inf], [1.0]], [1.0], [0.0, 1.0], np.nan),  # 0 * inf
        ([[np.inf], [1.0]], [0.0], [1.0, 1.0], np.nan),  # inf * 0 inside the dot product
        ([[np.inf], [np.inf]], [1.0], [1.0, -1.0], np.nan),  # inf - inf across heads
        ([[-1.0], [1.0]], [1.0], [np.inf, 1.0], np.nan),  # inf * relu(-1)
        ([[-1.0], [-1.0]], [1.0], [-1.0, -1.0], 0.0),  # -0 from negative weights
    ],
)
def test_special_values(q: list[list[float]], k: list[float], w: list[float], expected: float) -> None:
    [[score]] = indexer_scores(np.array([q]), np.array([k]), np.array([w]))
    np.testing.assert_equal(score, expected)
    if expected == 0:
        assert not np.signbit(score)


def test_an_underflow_from_below_is_positive_zero() -> None:
    one = np.ones((1, 1))
    [[score]] = indexer_scores(one[None], one, -1e-300 * one, np.array([1e-100]))
    assert score == 0
    assert not np.signbit(score)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": np.zeros((2, 3, 4), np.uint8)},
            TypeError,
            "q: dtype uint8; allowed: float16, float32, float64",
        ),
        ({"q": np.zeros((2, 12))}, ValueError, r"q: shape \(2, 12\); allowed: \[T, H, D\]"),
        ({"q": np.zeros((2, 0, 4)), "w": np.zeros((2, 0))}, ValueError, "at least one head"),
        ({"k": np.zeros((5, 3))}, ValueError, r"k: shape \(5, 3\); allowed: \[S, 4\]"),
        ({"w": np.zeros((2, 4))}, ValueError, r"w: shape \(2, 4\); allowed: \[2, 3\]"),
        ({"k_scale": np.ones(4)}, ValueError, r"k_scale: shape \(4,\); allowed: \[5\]"),
        (
            {"k_scale": np.array([1, 1, 0, 1, 1.0])},
            ValueError,
            r"k_scale\[2\]: 0.0; allowed: positive and finite",
        ),
        (
            {"k_scale": np.array([1, np.nan, 1, 1, 1.0])},
            ValueError,
            r"k_scale\[1\]: nan; allowed: positive and finite",
        ),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Array], error: type[Exception], message: str) -> None:
    arguments: dict[str, Array] = {"q": np.zeros((2, 3, 4)), "k": np.zeros((5, 4)), "w": np.zeros((2, 3))}
    with pytest.raises(error, match=message):
        indexer_scores(**(arguments | change))
