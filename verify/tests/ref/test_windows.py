"""Window builders against predicates on (position, key) pairs written out one by one."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyscale_ref.windows as build

SMALL = settings(max_examples=50, deadline=None)


def visible(windows: build.Windows, num_keys: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The windows as a table [T, S] of what each row sees; checks dtype and range on the way."""
    start, end = windows
    assert start.dtype == end.dtype == np.int32
    assert (start >= 0).all()
    assert (start <= end).all()
    assert (end <= num_keys).all()
    key = np.arange(num_keys)
    return (start[:, None] <= key) & (key < end[:, None])


def table(num_rows: int, num_keys: int, sees: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([[sees(t, j) for j in range(num_keys)] for t in range(num_rows)], bool).reshape(
        num_rows, num_keys
    )


@SMALL
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5))
def test_causal_rows_are_the_last_positions_and_see_no_later_one(T: int, before: int, ratio: int) -> None:
    S = T + before
    want = table(T, S // ratio, lambda t, j: (j + 1) * ratio <= before + t + 1)
    np.testing.assert_array_equal(visible(build.causal(T, S, ratio=ratio), S // ratio), want)
    if before == 0:
        np.testing.assert_array_equal(visible(build.causal(T, ratio=ratio), S // ratio), want)


@SMALL
@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_packed_documents_are_causal_and_apart(lengths: list[int], ratio: int, padding: int) -> None:
    total = sum(lengths) + padding
    windows = build.packed(np.cumsum([0, *lengths]), total if padding else None, ratio=ratio)
    owner = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    place = [p for n in lengths for p in range(n)] + [-1] * padding
    key_owner = [d for d, n in enumerate(lengths) for _ in range(n // ratio)]
    key_last = [c * ratio + ratio - 1 for n in lengths for c in range(n // ratio)]
    want = table(
        len(owner), len(key_owner), lambda t, j: owner[t] == key_owner[j] and key_last[j] <= place[t]
    )
    np.testing.assert_array_equal(visible(windows, len(key_owner)), want)


@SMALL
@given(st.integers(0, 12), st.integers(1, 15))
def test_sliding_windows(T: int, width: int) -> None:
    seen = visible(build.sliding(T, width), T)
    np.testing.assert_array_equal(seen, table(T, T, lambda t, j: t - width < j <= t))
    seen = visible(build.sliding(T, width, causal=False), T)
    np.testing.assert_array_equal(seen, table(T, T, lambda t, j: abs(t - j) < width))


def test_full_windows_see_every_key() -> None:
    assert visible(build.full(3, 5), 5).all()
    assert visible(build.full(3, 0), 0).shape == (3, 0)


@SMALL
@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_split_the_positions(S: int, num_ranks: int) -> None:
    for split in (build.contiguous_rows, build.zigzag_rows):
        rows = [split(S, num_ranks, rank) for rank in range(num_ranks)]
        assert all(r.dtype == np.int32 and (np.diff(r) > 0).all() for r in rows)
        assert sorted(np.concatenate(rows).tolist()) == list(range(S))
        sizes = [len(r) for r in rows]
        assert max(sizes) - min(sizes) <= (1 if split is build.contiguous_rows else 2)


def test_zigzag_ranks_see_the_same_number_of_keys() -> None:
    parts = [build.causal(64).rows(build.zigzag_rows(64, 4, rank)) for rank in range(4)]
    assert {int((p.end - p.start).sum()) for p in parts} == {64 * 65 // 2 // 4}
    assert build.zigzag_rows(16, 2, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert build.zigzag_rows(16, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_zigzag_rows_of_packed_documents() -> None:
    whole = build.packed([0, 5, 5, 16])
    rows = build.zigzag_rows(16, 2, 1)
    part = whole.rows(rows)
    np.testing.assert_array_equal(visible(part, 16), visible(whole, 16)[rows])


@SMALL
@given(st.integers(0, 4), st.integers(0, 5))
def test_a_batch_repeats_the_windows_on_its_own_keys(B: int, T: int) -> None:
    S = T + 2
    one = visible(build.causal(T, S), S)
    batch = visible(build.causal(T, S).batched(B, S), B * S).reshape(B, T, B, S)
    for a in range(B):
        for b in range(B):
            np.testing.assert_array_equal(batch[a, :, b], one if a == b else np.zeros_like(one))


def test_resolve_completes_and_flags() -> None:
    (start, end), bad = build.resolve(None, None, 3, 3)
    assert (start.tolist(), end.tolist(), bad.tolist()) == ([0, 0, 0], [1, 2, 3], [False] * 3)
    (start, end), bad = build.resolve([1, 2], None, 2, 5)
    assert (start.tolist(), end.tolist(), bool(bad.any())) == ([1, 2], [5, 5], False)
    (start, end), bad = build.resolve(None, [1, 2], 2, 5)
    assert (start.tolist(), end.tolist(), bool(bad.any())) == ([0, 0], [1, 2], False)
    (start, end), bad = build.resolve([-1, 0, 2, 1, 4], [1, 5, 1, 1, 4], 5, 4)
    assert bad.tolist() == [True, True, True, False, False]
    assert (end - start).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: build.causal(5, 4), ValueError, "num_positions: 4; allowed: 5 to"),
        (lambda: build.causal(-1), ValueError, "num_queries: -1; allowed: 0 to 2147483647"),
        (lambda: build.causal(cast(int, 2.0)), TypeError, "num_queries: 2.0 is a float; allowed: an integer"),
        (lambda: build.causal(True), TypeError, "num_queries: True is a bool"),
        (lambda: build.causal(4, ratio=0), ValueError, "ratio: 0; allowed: 1 to"),
        (lambda: build.packed([]), ValueError, "cu_seqlens: .*a first entry of 0"),
        (lambda: build.packed([1, 2]), ValueError, "cu_seqlens: .*a first entry of 0"),
        (lambda: build.packed([0, 5, 3]), ValueError, r"cu_seqlens\[2\]: 3 after 5; allowed: never falling"),
        (lambda: build.packed([0, 5], 4), ValueError, "num_positions: 4; allowed: 5 to"),
        (lambda: build.packed([0.0, 1.0]), TypeError, "cu_seqlens: dtype float64; allowed: integers"),
        (lambda: build.packed([0, 2**31]), ValueError, "cu_seqlens: .*exceed int32"),
        (lambda: build.sliding(4, 0), ValueError, "width: 0; allowed: 1 to"),
        (lambda: build.contiguous_rows(8, 0, 0), ValueError, "num_ranks: 0; allowed: 1 to"),
        (lambda: build.zigzag_rows(8, 2, 2), ValueError, "rank: 2; allowed: 0 to 1"),
        (lambda: build.causal(4).rows([4]), ValueError, "positions: 4; allowed: 0 to 3"),
        (
            lambda: build.causal(4).batched(2, 2**30),
            ValueError,
            "num_keys: 1073741824; allowed: 0 to 1073741823",
        ),
        (lambda: build.resolve(None, None, 3, 4), ValueError, "start, end: None with 3 queries and 4 keys"),
        (lambda: build.resolve([0], [1, 2], 2, 2), ValueError, r"start: shape \(1,\); allowed: \[2\]"),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
