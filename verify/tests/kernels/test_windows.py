"""Torch window builders against the NumPy ones, under torch.compile too, and on values that are wrong."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyscale_kernels.windows as build
import hyscale_ref.windows as reference

SMALL = settings(max_examples=50, deadline=None)
DTYPE = st.sampled_from([torch.int32, torch.int64])


def assert_same(actual: build.Windows, expected: reference.Windows) -> None:
    for have, want in zip(actual, expected, strict=True):
        assert have.dtype == torch.int32
        np.testing.assert_array_equal(have.numpy(), want)


@SMALL
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_causal_and_full(T: int, before: int, ratio: int) -> None:
    assert_same(build.causal(T, T + before, ratio=ratio), reference.causal(T, T + before, ratio=ratio))
    assert_same(build.causal(T, ratio=ratio), reference.causal(T, ratio=ratio))
    assert_same(build.full(T, before), reference.full(T, before))


@SMALL
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 4), st.integers(1, 4), DTYPE)
def test_packed(lengths: list[int], padding: int, ratio: int, dtype: torch.dtype) -> None:
    cu_seqlens, total = np.cumsum([0, *lengths]), sum(lengths) + padding
    actual = build.packed(torch.tensor(cu_seqlens, dtype=dtype), total, ratio=ratio)
    assert_same(actual, reference.packed(cu_seqlens, total, ratio=ratio))


@SMALL
@given(st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_sliding(T: int, width: int, causal: bool) -> None:
    assert_same(build.sliding(T, width, causal=causal), reference.sliding(T, width, causal=causal))


def test_sliding_at_the_largest_width() -> None:
    assert_same(build.sliding(5, 2**31 - 1, causal=False), reference.sliding(5, 2**31 - 1, causal=False))


@SMALL
@given(st.integers(0, 50), st.integers(1, 6), st.data(), DTYPE)
def test_rows_of_ranks_and_batches(S: int, num_ranks: int, data: st.DataObject, dtype: torch.dtype) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    for name in ("contiguous_rows", "zigzag_rows"):
        rows, want = (getattr(module, name)(S, num_ranks, rank) for module in (build, reference))
        assert rows.dtype == torch.int32
        np.testing.assert_array_equal(rows.numpy(), want)
        assert_same(build.causal(S).rows(rows.to(dtype)), reference.causal(S).rows(want))
    assert_same(build.causal(S).batched(num_ranks, S), reference.causal(S).batched(num_ranks, S))


def test_no_recompilation_and_no_reading_of_values_under_compile() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def windows(cu_seqlens: torch.Tensor, x: torch.Tensor) -> build.Windows:
        T = x.shape[0]
        return build.packed(cu_seqlens, T).rows(build.zigzag_rows(T, 2, 1))

    for cu_seqlens in ([0, 3, 8], [0, 4, 4, 12], [0, 2, 16]):
        T = cu_seqlens[-1]
        want = reference.packed(cu_seqlens).rows(reference.zigzag_rows(T, 2, 1))
        assert_same(windows(torch.tensor(cu_seqlens), torch.zeros(T)), want)


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 9], [1, 8], [0, 6, 3, 8], [3]])
def test_wrong_values_make_invalid_windows_where_they_cannot_be_read(
    cu_seqlens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_can_look", lambda value: False)  # as on a GPU
    windows = build.packed(torch.tensor(cu_seqlens), 8)
    assert (windows.start == -1).all()
    rows = build.causal(4).rows(torch.tensor([-1, 0, 3, 4]))
    assert (rows.start == -1).tolist() == [True, False, False, True]
    assert (build.causal(0).rows(torch.tensor([0])).start == -1).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: build.causal(5, 4), ValueError, "num_positions: 4; allowed: 5 to"),
        (
            lambda: build.causal(cast(int, 2.0)),
            TypeError,
            r"num_queries: 2\.0 is a float; allowed: an integer",
        ),
        (
            lambda: build.packed(torch.tensor([0, 5, 3]), 8),
            ValueError,
            r"cu_seqlens: \[0, 5, 3\]; allowed: from 0",
        ),
        (lambda: build.packed(torch.tensor([0, 9]), 8), ValueError, r"cu_seqlens: \[0, 9\]; .* at most 8"),
        (lambda: build.packed(torch.tensor([1, 8]), 8), ValueError, r"cu_seqlens: \[1, 8\]"),
        (lambda: build.packed(torch.zeros(0, dtype=torch.int32), 0), ValueError, r"cu_seqlens: shape \[0\]"),
        (
            lambda: build.packed(torch.zeros(2), 0),
            TypeError,
            r"cu_seqlens: dtype torch\.float32; allowed: int32",
        ),
        (lambda: build.packed(cast(torch.Tensor, [0, 1]), 1), TypeError, "cu_seqlens: list; allowed: torch"),
        (lambda: build.sliding(4, 0), ValueError, "width: 0; allowed: 1 to"),
        (lambda: build.contiguous_rows(8, 0, 0), ValueError, "num_ranks: 0; allowed: 1 to"),
        (lambda: build.zigzag_rows(8, 2, 2), ValueError, "rank: 2; allowed: 0 to 1"),
        (lambda: build.causal(4).rows(torch.tensor([4])), ValueError, "positions: 4; allowed: 0 to 3"),
        (lambda: build.causal(4).rows(torch.tensor([[0]])), ValueError, r"positions: shape \[1, 1\]"),
        (
            lambda: build.causal(4, device="meta").rows(torch.tensor([0])),
            ValueError,
            "positions: on cpu; allowed: meta",
        ),
        (
            lambda: build.causal(4).batched(2, 2**30),
            ValueError,
            "num_keys: 1073741824; allowed: 0 to 1073741823",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
