"""Certified sets against every choice of scores inside the intervals, on tables small enough to try all."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_ref.bounds import HOPPER_E4M3, TENSOR_CORE_16BIT, Arithmetic, bounded_scores
from hyscale_ref.certified import ambiguous_fraction, certified_sets, judge
from hyscale_ref.formats import BF16, E4M3, Format, round_to
from hyscale_ref.topk import topk

Array = NDArray[Any]

# Small integers, so that intervals touch, nest and tie all the time.
ENTRY = st.tuples(st.integers(-2, 2), st.sampled_from([0, 0, 0, 1, 2, math.inf])) | st.just((math.nan, 0))


def choices(score: float, bound: float) -> list[float]:
    """Every integer of an interval, which is enough to order it among others; extremes if unbounded."""
    if math.isinf(bound):
        return [math.nan, -9.0, 9.0]
    return [score + step for step in range(-int(bound), int(bound) + 1)]


@settings(max_examples=150, deadline=None)
@given(st.lists(ENTRY, min_size=1, max_size=4), st.integers(1, 4))
def test_a_key_is_certain_exactly_when_every_choice_agrees(row: list[tuple[float, float]], K: int) -> None:
    scores, bound = (np.array([column], float) for column in zip(*row, strict=True))
    n = len(row)
    sets = certified_sets(scores, bound, K, [0], [n])
    tables = np.array(list(itertools.product(*(choices(*entry) for entry in row))), float)
    selection = topk(tables, K, np.zeros(len(tables), int), np.full(len(tables), n))
    members = (selection.indices[:, :, None] == np.arange(n)).any(axis=1)
    np.testing.assert_array_equal(sets.must_in[0], members.all(axis=0))
    np.testing.assert_array_equal(sets.must_out[0], ~members.any(axis=0))
    for indices in np.unique(selection.indices, axis=0):
        assert judge(indices[None], scores, bound, K, [0], [n]) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan]), max_size=8),
    st.integers(1, 9),
    st.integers(-1, 9),
    st.integers(-1, 9),
)
def test_without_bounds_only_the_selection_itself_passes(
    row: list[float], K: int, start: int, end: int
) -> None:
    scores = np.array([row], float)
    zero = np.zeros_like(scores)
    selection = topk(scores, K, [start], [end])
    sets = certified_sets(scores, zero, K, [start], [end])
    chosen = np.isin(np.arange(len(row)), selection.indices[0])
    np.testing.assert_array_equal(sets.must_in[0], chosen)
    np.testing.assert_array_equal(sets.must_out[0], ~chosen)
    assert ambiguous_fraction(sets, [start], [end]) == 0
    assert judge(selection.indices, scores, zero, K, [start], [end]) == []
    for other in itertools.combinations(range(len(row)), int(selection.count[0])):
        if list(other) != selection.indices[0, : len(other)].tolist():
            indices = [[*other, *[-1] * (K - len(other))]]
            assert judge(indices, scores, zero, K, [start], [end])


SCORES, BOUND = np.array([[5.0, 4.0, 3.0, 2.0]] * 3), np.full((3, 4), 0.25)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([0, 1], []),
        (
            [0, 2],
            [
                "row 1: key 1 must be selected: its score 4 lies in [3.75, 4.25]; "
                "the best 2 end at a score in [3.75, 4.25]",
                "row 1: key 2 must not be selected: its score 3 lies in [2.75, 3.25]; "
                "the best 2 end at a score in [3.75, 4.25]",
            ],
        ),
        ([1, 0], ["row 1: indices do not ascend: 1 then 0"]),
        ([0, 0], ["row 1: key 0 is selected 2 times", "row 1: key 1 must be selected"]),
        ([-1, 1], ["row 1: -1 stands before a key: [-1, 1]", "row 1: key 0 must be selected"]),
        ([0, -1], ["row 1: 1 keys are selected; allowed: 2", "row 1: key 1 must be selected"]),
        ([0, 3], ["row 1: index 3 is outside its window [0, 3)", "row 1: key 1 must be selected"]),
        ([0, -7], ["row 1: index -7 is outside its window [0, 3)", "row 1: key 1 must be selected"]),
        ([0, 99], ["row 1: index 99 is outside its window [0, 3)", "row 1: key 1 must be selected"]),
    ],
)
def test_violations_are_explained(indices: list[int], expected: list[str]) -> None:
    table = np.array([[0, 1], indices, [0, 1]])
    found = [str(v) for v in judge(table, SCORES, BOUND, 2, [0, 0, 0], [4, 3, 4])]
    assert len(found) == len(expected)
    for message, start in zip(found, expected, strict=True):
        assert message.startswith(start)


def test_order_matters_only_if_asked() -> None:
    assert judge([[1, 0]], SCORES[:1], BOUND[:1], 2, [0], [4], ordered=False) == []
    assert judge([[-1, 0, 1]], SCORES[:1], BOUND[:1], 3, [0], [2], ordered=False) == []


def test_a_selected_nan_is_a_violation() -> None:
    scores = np.array([[np.nan, 1.0]])
    [violation] = judge([[0, 1]], scores, np.zeros((1, 2)), 2, [0], [2])[1:]
    assert str(violation).startswith("row 0: key 0 must not be selected: its score nan lies in no interval")


@pytest.mark.parametrize(
    ("arithmetic", "fmt", "most"), [(TENSOR_CORE_16BIT, BF16, 2e-4), (HOPPER_E4M3, E4M3, 0.1)]
)
def test_few_keys_are_ambiguous(arithmetic: Arithmetic, fmt: Format, most: float) -> None:
    """Normal data at S = 4096: the certificate decides nearly every key in bf16, and most in fp8."""
    rng = np.random.default_rng(0)
    q, k = (round_to(rng.standard_normal(shape), fmt) for shape in [(8, 32, 128), (4096, 128)])
    scores, bound = bounded_scores(q, k, rng.standard_normal((8, 32)), arithmetic=arithmetic)
    start, end = np.zeros(8, int), np.full(8, 4096)
    fraction = ambiguous_fraction(certified_sets(scores, bound, 256, start, end), start, end)
    assert 0 <= fraction < most


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: certified_sets(SCORES, BOUND[:2], 2),
            ValueError,
            r"bound: shape \(2, 4\); allowed: \[3, 4\]",
        ),
        (lambda: certified_sets(SCORES, -BOUND, 2, [0] * 3, [4] * 3), ValueError, r"bound\[0, 0\]: -0.25"),
        (lambda: certified_sets(SCORES, BOUND, 0, [0] * 3, [4] * 3), ValueError, "top_k: 0; allowed: 1"),
        (lambda: judge([[0]], SCORES, BOUND, 1, [0] * 3, [4] * 3), ValueError, r"indices: shape \(1, 1\)"),
        (
            lambda: judge(np.zeros((3, 1)), SCORES, BOUND, 1, [0] * 3, [4] * 3),
            TypeError,
            "indices: dtype float64",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
