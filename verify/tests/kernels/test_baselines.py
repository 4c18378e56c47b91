"""The plain PyTorch rivals against the oracle: exact inputs, every window, special values, chunk sizes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyscale_kernels.baselines import Selected, materialised_topk, slab_topk
from hyscale_kernels.baselines.scoring import check_inputs, score_rows
from hyscale_ref import windows
from hyscale_ref.bounds import FLOAT32, bounded_scores
from hyscale_ref.scores import indexer_scores
from hyscale_ref.topk import topk

Baseline = Callable[..., Selected]
BASELINES: list[Baseline] = [materialised_topk, slab_topk]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def integers(seed: int, T: int, S: int, H: int, D: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Small integers: every product and sum is exact in every format, and ties abound."""
    rng = np.random.default_rng(seed)
    q, k, w = (rng.integers(-2, 3, shape) for shape in [(T, H, D), (S, D), (T, H)])
    scale = 2.0 ** rng.integers(-2, 3, S) if dtype == torch.float8_e4m3fn else None
    numbers: list[Any] = [x.astype(np.float64) for x in (q, k, w)]
    tensors = [torch.tensor(x).to(t) for x, t in zip(numbers, (dtype, dtype, torch.float32), strict=True)]
    k_scale = None if scale is None else torch.tensor(scale, dtype=torch.float32)
    return indexer_scores(numbers[0], numbers[1], numbers[2], scale), tensors, k_scale


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    T=st.integers(0, 6),
    S=st.integers(0, 40),
    top_k=st.integers(1, 14) | st.just(50),
    dtype=st.sampled_from(DTYPES),
    chunk=st.sampled_from([1, 500, 2**20]),
)
def test_exact_inputs(seed: int, T: int, S: int, top_k: int, dtype: torch.dtype, chunk: int) -> None:
    scores, tensors, k_scale = integers(seed, T, S, 3, 4, dtype)
    start, end = np.sort(np.random.default_rng(seed).integers(0, S + 1, (2, T)), axis=0).astype(np.int32)
    window: dict[str, Any] = {"start": torch.tensor(start), "end": torch.tensor(end)}
    window |= {"top_k": top_k, "k_scale": k_scale}
    want = topk(scores, top_k, start, end)

    exact = slab_topk(*tensors, **window, slab_bytes=chunk)
    np.testing.assert_array_equal(exact.indices.numpy(), want.indices)
    np.testing.assert_array_equal(exact.count.numpy(), want.count)

    rival = materialised_topk(*tensors, **window, chunk_bytes=chunk)
    np.testing.assert_array_equal(rival.count.numpy(), want.count)
    for t in range(T):
        keys = rival.indices[t, : want.count[t]].numpy()
        assert (np.diff(keys) > 0).all()
        assert ((keys >= start[t]) & (keys < end[t])).all()
        best = want.scores[t, : want.count[t]]
        np.testing.assert_array_equal(np.sort(scores[t, keys]), np.sort(best), "whatever the tie")
    assert (rival.indices.numpy()[want.indices == -1] == -1).all()


@pytest.mark.parametrize("select", BASELINES)
def test_causal_by_default(select: Baseline) -> None:
    torch.manual_seed(0)
    q, k, w = torch.rand(9, 2, 4), torch.rand(9, 4), torch.rand(9, 2)  # without ties
    start, end = (torch.tensor(x) for x in windows.causal(9))
    memory = {"slab_bytes" if select is slab_topk else "chunk_bytes": 1}  # one row at a time
    for K in (3, 9):
        want = select(q, k, w, K, start=start, end=end)
        assert want.count.tolist() == [min(K, t + 1) for t in range(9)]
        for keywords in ({}, memory, {"end": end}):
            assert torch.equal(select(q, k, w, K, **keywords).indices, want.indices)


@pytest.mark.parametrize("select", BASELINES)
def test_special_scores(select: Baseline) -> None:
    """One head and one element: score = relu(q k) w, so keys can be given any score with one sign."""
    nan, inf = float("nan"), float("inf")
    k = torch.tensor([[nan], [inf], [3.0], [-1.0], [inf], [1.0]])
    q = torch.ones(2, 1, 1)
    w = torch.tensor([[1.0], [-1.0]])
    end = torch.tensor([6, 6], dtype=torch.int32)
    assert select(q, k, w, 3, end=end).indices.tolist() == [[1, 2, 4], [2, 3, 5]]
    every = select(q, k, w, 6, end=end)
    assert every.indices.tolist() == [[1, 2, 3, 4, 5, -1]] * 2, "NaN is not selected, -inf is"
    assert every.count.tolist() == [5, 5]


def test_an_underflow_from_below_ties_with_zero() -> None:
    q, k = (torch.ones(shape).to(torch.float8_e4m3fn) for shape in [(1, 1, 1), (2, 1)])
    k_scale, end = torch.tensor([1e-30, 1e-30]), torch.tensor([2], dtype=torch.int32)
    k[0] = -1  # relu makes its score +0; that of key 1 underflows to -0
    inputs = check_inputs(q, k, torch.tensor([[-1e-30]]), 1, None, end, k_scale)
    assert score_rows(inputs, slice(0, 1), 2).signbit().tolist() == [[False, False]]


def test_scores_are_within_the_float32_bound() -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(4, 8, 32).bfloat16(), torch.randn(50, 32).bfloat16(), torch.randn(4, 8)
    inputs = check_inputs(q, k, w, 1, torch.zeros(4, dtype=torch.int32), None, None)
    scores, bound = bounded_scores(*(x.double().numpy() for x in (q, k, w)), arithmetic=FLOAT32)
    assert (np.abs(score_rows(inputs, slice(0, 4), 50).numpy() - scores) <= bound).all()


@pytest.mark.parametrize("select", BASELINES)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 12).bfloat16()}, ValueError, r"q: shape \[2, 12\]; allowed: \[T, H, D\]"),
        (
            {"q": torch.zeros(2, 3, 4).double()},
            TypeError,
            r"q: dtype torch\.float64; allowed: torch\.bfloat16",
        ),
        ({"k": torch.zeros(5, 4)}, TypeError, r"k: dtype torch\.float32; allowed: torch\.bfloat16"),
        ({"k": torch.zeros(5, 3).bfloat16()}, ValueError, r"k: shape \[5, 3\]; allowed: \[S, 4\]"),
        (
            {"w": torch.zeros(2, 3).bfloat16()},
            TypeError,
            r"w: dtype torch\.bfloat16; allowed: torch\.float32",
        ),
        ({"w": torch.zeros(3, 2)}, ValueError, r"w: shape \[3, 2\]; allowed: \[2, 3\]"),
        ({"top_k": 0}, ValueError, "top_k: 0; allowed: 1 or more"),
        ({"top_k": 2.0}, TypeError, r"top_k: 2\.0 is a float; allowed: an integer"),
        ({"start": None, "end": None}, ValueError, "start, end: None with 2 queries and 5 keys"),
        ({"start": torch.zeros(2)}, TypeError, r"start: dtype torch\.float32; allowed: torch\.int32"),
        (
            {"end": torch.tensor([5, 6], dtype=torch.int32)},
            ValueError,
            r"row 1 has the window \[0, 6\)",
        ),
        ({"k_scale": torch.ones(5)}, ValueError, r"k_scale: given with q torch\.bfloat16"),
        ({"w": torch.zeros(2, 3, device="meta")}, ValueError, "w: on meta; allowed: cpu"),
        ({"q": [1]}, TypeError, r"q: list; allowed: torch\.Tensor"),
    ],
)
def test_wrong_arguments_are_named(
    select: Baseline, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {
        "q": torch.zeros(2, 3, 4).bfloat16(),
        "k": torch.zeros(5, 4).bfloat16(),
        "w": torch.zeros(2, 3),
        "top_k": 2,
        "end": torch.full((2,), 5, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        select(**(arguments | change))


def test_wrong_scales_are_named() -> None:
    q, k, w = torch.zeros(2, 3, 4), torch.zeros(2, 4), torch.zeros(2, 3)
    fp8 = (q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), w, 1)
    with pytest.raises(ValueError, match=r"k_scale\[1\]: 0\.0; allowed: positive and finite"):
        slab_topk(*fp8, k_scale=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"k_scale: None with q torch\.float8_e4m3fn"):
        slab_topk(*fp8)
