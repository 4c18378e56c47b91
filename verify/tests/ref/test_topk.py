"""Top-k by stable sort against the order written out key by key."""

import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyscale_ref.topk import topk

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1.0 + 2**-23, 1e-45, -1e-45]
ROW = st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), max_size=9)


def better(score: float, key: int, than_score: float, than_key: int) -> bool:
    """The total order, one pair at a time."""
    return score > than_score or (score == than_score and key < than_key)


@settings(max_examples=300, deadline=None)
@given(ROW, st.integers(1, 11), st.integers(-2, 11), st.integers(-2, 11))
@example([0.0, -0.0, 0.0], 2, 0, 3)
@example([-math.inf, math.nan, -math.inf], 3, 0, 3)
def test_every_key_is_selected_or_beaten(row: list[float], K: int, start: int, end: int) -> None:
    scores = np.array([row], np.float32)
    selection = topk(scores, K, [start], [end])
    [count] = selection.count
    keys = selection.indices[0, :count].tolist()
    valid_window = 0 <= start <= end <= len(row)
    window = range(start, end) if valid_window else range(0)
    usable = [j for j in window if not math.isnan(row[j])]

    assert selection.bad_window.tolist() == [not valid_window]
    assert selection.nan_count.tolist() == [len(window) - len(usable)]
    assert count == min(K, len(usable))
    assert keys == sorted(set(keys)), "ascending and unique"
    assert set(keys) <= set(usable)
    for j in set(usable) - set(keys):
        assert all(better(scores[0, i], i, scores[0, j], j) for i in keys)
    assert (selection.indices[0, count:] == -1).all()
    assert (selection.scores[0, count:] == -np.inf).all()
    np.testing.assert_array_equal(selection.scores[0, :count], scores[0, keys])
    assert not np.signbit(selection.scores[selection.scores == 0]).any()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 600))
def test_long_rows_full_of_ties(seed: int, K: int) -> None:
    """Longer than any cut-off below which an unstable sort is stable by accident."""
    row = np.random.default_rng(seed).integers(0, 3, 500).astype(np.float32)
    order = sorted(range(500), key=lambda j: (-row[j], j))
    selection = topk(row[None], K, [0], [500])
    assert selection.indices[0, : selection.count[0]].tolist() == sorted(order[:K])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes(dtype: type[np.floating[Any]]) -> None:
    selection = topk(np.array([[1, 3, 2], [1, 1, 1], [5, 4, 6]], dtype), 2)
    assert selection.scores.dtype == dtype
    assert selection.indices.dtype == selection.count.dtype == np.int32
    assert selection.indices.tolist() == [[0, -1], [0, 1], [0, 2]]
    assert selection.count.tolist() == [1, 2, 2]


def test_empty_tables() -> None:
    assert topk(np.zeros((0, 0)), 3).indices.shape == (0, 3)
    selection = topk(np.zeros((2, 0)), 3, [0, 0], [0, 0])
    assert selection.count.tolist() == [0, 0]
    assert not selection.bad_window.any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: topk(np.zeros((2, 2), int), 1), TypeError, "scores: dtype int64; allowed: float16"),
        (lambda: topk(np.zeros(2), 1), ValueError, r"scores: shape \(2,\); allowed: \[T, S\]"),
        (lambda: topk(np.zeros((2, 2)), 0), ValueError, "top_k: 0; allowed: 1 to"),
        (lambda: topk(np.zeros((2, 2)), cast(int, 1.5)), TypeError, "top_k: 1.5 is a float"),
        (lambda: topk(np.zeros((2, 3)), 1), ValueError, "start, end: None with 2 queries and 3 keys"),
        (lambda: topk(np.zeros((2, 3)), 1, None, [3]), ValueError, r"end: shape \(1,\); allowed: \[2\]"),
        (lambda: topk(np.zeros((2, 3)), 1, [0.0, 0.0], [3, 3]), TypeError, "start: dtype float64"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
