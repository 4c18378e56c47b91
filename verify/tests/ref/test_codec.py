"""Packed selections: round trips, sizes, and what happens to damaged words."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_ref.codec import (
    CorruptRecordError,
    RowLayout,
    decode,
    encode,
    packed_bits_per_index,
    row_words,
)

Array = NDArray[Any]


def random_rows(seed: int, T: int, N: int, K: int) -> tuple[Array, Array, Array]:
    """(indices, count, start) of T rows with random windows [start, N) and counts, extremes among them."""
    rng = np.random.default_rng(seed)
    indices, count, start = np.full((T, K), -1, np.int32), np.zeros(T, np.int32), np.zeros(T, np.int32)
    for t in range(T):
        start[t] = rng.integers(0, N + 1) if t % 2 else 0
        most = min(K, N - start[t])
        count[t] = most if t % 3 == 0 else rng.integers(0, most + 1)
        if rng.random() < 0.3:  # clustered at the end of the window, where values are largest
            keys = np.arange(N - count[t], N)
        else:
            keys = np.sort(rng.choice(N - start[t], count[t], replace=False)) + start[t]
        indices[t, : count[t]] = keys
    return indices, count, start


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 3000), st.integers(1, 100))
@example(0, 3, 0, 1)
@example(0, 6, 64, 64)
@example(0, 6, 2**16, 17)
def test_round_trip(seed: int, T: int, N: int, K: int) -> None:
    indices, count, start = random_rows(seed, T, N, K)
    words = encode(indices, count, start, N)
    assert words.dtype == np.uint32
    assert words.shape == (T, row_words(N, K))
    for stored in (words, words.view(np.int32)):
        got_indices, got_count = decode(stored, start, N, K)
        np.testing.assert_array_equal(got_indices, indices)
        np.testing.assert_array_equal(got_count, count)
        assert got_indices.dtype == got_count.dtype == np.int32
    for t in range(T):  # rows stand alone
        np.testing.assert_array_equal(decode(words[t : t + 1], start[t : t + 1], N, K)[0][0], indices[t])


def test_round_trip_at_the_largest_number_of_keys() -> None:
    N = 2**31 - 1
    indices = np.array([[0, 1, N - 2, N - 1], [5, 2**30, -1, -1], [N - 1, -1, -1, -1]] * 2, np.int32)
    indices = np.concatenate([indices, np.full((6, 60), -1, np.int32)], axis=1)
    count, start = np.array([4, 2, 1] * 2), np.array([0, 5, N - 1] * 2)
    assert not RowLayout(N, 64).raw
    got, _ = decode(encode(indices, count, start, N), start, N, 64)
    np.testing.assert_array_equal(got, indices)


def test_size_at_a_million_keys() -> None:
    bits = packed_bits_per_index(2**20, 2048)
    information = (
        (math.lgamma(2**20 + 1) - math.lgamma(2049) - math.lgamma(2**20 - 2047)) / math.log(2) / 2048
    )
    assert information < 10.45
    assert 11 <= bits <= 11.1


@pytest.mark.parametrize("N", [0, 1, 2, 31, 2047, 2048, 2049, 4097, 10**5, 2**20, 2**20 + 1, 2**31 - 1])
@pytest.mark.parametrize("K", [1, 2, 3, 31, 32, 33, 100, 512, 2048, 4096, 100_000])
def test_size_follows_the_formula_and_never_exceeds_int32(N: int, K: int) -> None:
    layout = RowLayout(N, K)
    M = min(N, K)
    assert layout.words <= 1 + M <= 1 + K, "int32 indices and a count"
    if not layout.raw:
        low = max(math.floor(math.log2(N / M)), 0)
        high = M + math.ceil(N / 2**low)
        assert layout.words == 2 + math.ceil(low * M / 32) + math.ceil(high / 32)
    if M >= 256:
        assert not layout.raw, "packing pays"


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 2**20))
@example(2**31 - 1, 2**20)
def test_no_record_is_larger_than_int32_indices_and_counts(N: int, K: int) -> None:
    assert row_words(N, K) <= K + 1
    assert packed_bits_per_index(N, K) <= 32 * (K + 1) / K


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(("random", "one run", "runs of 16", "last keys")))
def test_clustered_sets_take_what_random_ones_take(seed: int, kind: str) -> None:
    N, K = 2**20, 2048
    rng = np.random.default_rng(seed)
    first = {
        "random": lambda: rng.choice(N, K, replace=False),
        "one run": lambda: rng.integers(0, N - K) + np.arange(K),
        "runs of 16": lambda: (
            16 * rng.choice(N // 16, K // 16, replace=False)[:, None] + np.arange(16)
        ).ravel(),
        "last keys": lambda: np.arange(N - K, N),
    }
    words = encode(np.sort(first[kind]())[None], [K], None, N)
    assert words.nbytes * 8 / K == packed_bits_per_index(N, K) == 11.03125


def test_the_words_of_a_small_row_by_hand() -> None:
    """N = 64, K = 16: l = 2. Values 0 5 6 63 have high parts 0 1 1 15, at bits 0 2 3 18."""
    indices = np.full((1, 16), -1)
    indices[0, :4] = [10, 15, 16, 73]
    [words] = encode(indices, [4], [10], 74)
    assert RowLayout(74, 16).low_bits == 2
    low = 0 | (5 & 3) << 2 | (6 & 3) << 4 | (63 & 3) << 6
    high = 1 << 0 | 1 << (1 + 1) | 1 << (1 + 2) | 1 << (15 + 3)
    assert words.tolist() == [4, 0 + 5 + 6 + 63, low, high, 0]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.integers(1, 64), st.data())
def test_a_flipped_bit_is_an_error_when_packed(seed: int, N: int, K: int, data: st.DataObject) -> None:
    indices, count, start = random_rows(seed, 3, N, K)
    words = encode(indices, count, start, N)
    damaged = words.copy()
    row, word = data.draw(st.integers(0, 2)), data.draw(st.integers(0, words.shape[1] - 1))
    damaged[row, word] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    if RowLayout(N, K).raw:
        try:
            got, got_count = decode(damaged, start, N, K)
        except CorruptRecordError:
            return
        assert (got[row] != indices[row]).any(), "raw rows have no checksum: another valid selection"
        assert (np.diff(got[row, : got_count[row]]) > 0).all()
    else:
        with pytest.raises(CorruptRecordError, match=f"words: row {row} is corrupt"):
            decode(damaged, start, N, K)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.integers(1, 64))
def test_random_words_never_give_a_malformed_selection(seed: int, N: int, K: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (1, row_words(N, K)), np.uint32)
    words[:, 0] %= K + 1
    try:
        [indices], [count] = decode(words, None, N, K)
    except CorruptRecordError:
        return
    assert (np.diff(indices[:count]) > 0).all()
    assert ((indices[:count] >= 0) & (indices[:count] < N)).all()


@pytest.mark.parametrize("values", [[5, 5], [6, 5]])
def test_values_that_do_not_ascend_are_an_error(values: list[int]) -> None:
    assert RowLayout(2**20, 2).raw
    with pytest.raises(CorruptRecordError, match="row 0 is corrupt: indices do not ascend"):
        decode(np.array([[2, *values]], np.uint32), None, 2**20, 2)
    low, high = values[0] | values[1] << 3, 1 | 1 << 1  # both high parts 0, l = 3
    packed = np.array([[2, sum(values), low, 0, high]], np.uint32)
    assert RowLayout(128, 16).low_bits == 3
    with pytest.raises(CorruptRecordError, match="row 0 is corrupt: indices do not ascend"):
        decode(packed, None, 128, 16)


def test_another_start_is_an_error_when_indices_leave_the_keys() -> None:
    indices = np.arange(36, 100)[None]
    words = encode(indices, [64], [30], 100)
    with pytest.raises(CorruptRecordError, match="an index is not below 100"):
        decode(words, [31], 100, 64)


ROW = np.array([[1, 2, -1]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: encode([[2, 1, -1]], [2], None, 9),
            ValueError,
            r"row 0 \(start 0, count 2\): indices do not ascend",
        ),
        (lambda: encode([[1, 1, -1]], [2], None, 9), ValueError, "indices do not ascend"),
        (lambda: encode(ROW, [1], None, 9), ValueError, "-1 is not exactly the tail beyond count"),
        (lambda: encode(ROW, [3], None, 9), ValueError, "-1 is not exactly the tail beyond count"),
        (lambda: encode(ROW, [4], None, 9), ValueError, "count is not in 0 to 3"),
        (lambda: encode(ROW, [2], None, 2), ValueError, r"an index is not in \[start, 2\)"),
        (lambda: encode(ROW, [2], [2], 9), ValueError, r"an index is not in \[start, 9\)"),
        (lambda: encode(ROW, [2], [-1], 9), ValueError, "start is negative"),
        (lambda: encode(ROW, [2, 2], None, 9), ValueError, r"count: shape \(2,\); allowed: \[1\]"),
        (
            lambda: encode(ROW.astype(float), [2], None, 9),
            TypeError,
            "indices: dtype float64; allowed: integers",
        ),
        (lambda: encode(ROW, [2], None, 2**31), ValueError, "num_keys: 2147483648; allowed: 0 to 2147483647"),
        (
            lambda: decode(np.zeros((1, 3), np.uint32), None, 9, 3),
            ValueError,
            r"words: shape \(1, 3\); .*T, 4",
        ),
        (
            lambda: decode(np.zeros((1, 4)), None, 9, 3),
            TypeError,
            "words: dtype float64; allowed",
        ),
        (lambda: row_words(9, 0), ValueError, "top_k: 0; allowed: 1 to"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
