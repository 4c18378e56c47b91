"""Score bounds against emulated arithmetic: they hold for every order tried, and they are nearly reached."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyscale_ref.bounds import (
    FLOAT32,
    HOPPER_E4M3,
    TENSOR_CORE_16BIT,
    Arithmetic,
    TensorCore,
    bounded_scores,
)
from hyscale_ref.formats import BF16, E4M3, FP16, FP32, Format, round_to
from hyscale_ref.scores import indexer_scores

Array = NDArray[Any]
Order = Literal["forward", "shuffled", "pairwise"]


def add_up(terms: Array, order: Order, rng: np.random.Generator, *, flush: bool = False) -> Array:
    """Sum of float32 ``terms`` over the last axis, rounded to float32 after each addition."""
    terms = np.moveaxis(terms.astype(np.float32), -1, 0)
    if order == "shuffled":
        terms = rng.permutation(terms)
    while order == "pairwise" and len(terms) > 1:
        if len(terms) % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[:1])])
        terms = flushed(terms[0::2] + terms[1::2], flush)
    total: Array = terms[0]
    for term in terms[1:]:
        total = flushed(total + term, flush)
    return total


def flushed(x: Array, flush: bool) -> Array:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x) if flush else x


def float32_dot(q: Array, k: Array, order: Order, rng: np.random.Generator, *, flush: bool = False) -> Array:
    product = q.astype(np.float32) * k.astype(np.float32)
    return add_up(flushed(product, flush), order, rng, flush=flush)


def tensor_core_dot(
    q: Array, k: Array, core: TensorCore, rng: np.random.Generator | None, *, toward_zero: bool = True
) -> Array:
    """The model of hyscale_ref.bounds: align, cut, sum exactly, cut; blocks in random order if ``rng``."""
    cut = np.trunc if toward_zero else np.floor
    total = np.zeros(np.broadcast_shapes(q.shape, k.shape)[:-1])
    blocks = np.arange(0, q.shape[-1], core.block)
    for i in blocks if rng is None else rng.permutation(blocks):
        product = q[..., i : i + core.block] * k[..., i : i + core.block]
        # The hardware aligns by the sum of the operands' exponents, up to one below the product's own.
        exponent = np.frexp(q[..., i : i + core.block])[1] + np.frexp(k[..., i : i + core.block])[1] - 2
        exponent = np.where(product == 0, -300, exponent).max(axis=-1)
        exponent = np.maximum(exponent, np.where(total == 0, -300, np.frexp(total)[1] - 1))
        grid = np.ldexp(1.0, exponent - core.alignment_bits)
        aligned = (cut(product / grid[..., None]).sum(axis=-1) + cut(total / grid)) * grid
        grid = np.ldexp(1.0, np.frexp(aligned)[1] - 1 - core.result_bits)
        total = cut(aligned / grid) * grid
    return total


def computed_scores(
    q: Array,
    k: Array,
    w: Array,
    scale: Array,
    arithmetic: Arithmetic,
    order: Order,
    rng: np.random.Generator,
    *,
    flush: bool = False,
) -> Array:
    """Scores [T, S] as a kernel might compute them: the emulated dot products, then float32."""
    q, k = q[:, None], k[None, :, None]  # [T, 1, H, D], [1, S, 1, D]
    with np.errstate(all="ignore"):
        if isinstance(arithmetic, TensorCore):
            dot = tensor_core_dot(q, k, arithmetic, rng, toward_zero=order != "pairwise").astype(np.float32)
        else:
            dot = float32_dot(q, k, order, rng, flush=flush)
        product = flushed(w.astype(np.float32)[:, None] * np.maximum(dot, np.float32(0)), flush)
        total = add_up(product, order, rng, flush=flush)
        return flushed(total * scale.astype(np.float32), flush)


def draw(rng: np.random.Generator, shape: tuple[int, ...], fmt: Format, regime: str) -> Array:
    x = rng.standard_normal(shape)
    if regime == "positive":
        x = np.abs(x) + 0.5
    elif regime == "wide":
        x = x * 2.0 ** rng.integers(-8, 8, shape)
    elif regime == "cancelling" and shape[-1] > 1:  # queries [T, H, D] against keys [S, D]
        half = shape[-1] // 2
        x[..., half : 2 * half] = x[..., :half] * (-1 if len(shape) == 3 else 1 + 2.0**-6)
    elif regime == "sparse":
        x = x * (rng.random(shape) < 0.1)
    elif regime == "tiny":
        x = x * 2.0**-66
    return round_to(x, fmt, saturate=True)


CASES = [
    (FLOAT32, FP32),
    (FLOAT32, BF16),
    (TENSOR_CORE_16BIT, BF16),
    (TENSOR_CORE_16BIT, FP16),
    (HOPPER_E4M3, E4M3),
]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    case=st.sampled_from(CASES),
    regime=st.sampled_from(["normal", "positive", "wide", "cancelling", "sparse", "tiny"]),
    order=st.sampled_from(["forward", "shuffled", "pairwise"]),
    D=st.sampled_from([1, 2, 31, 32, 100, 128]),
    H=st.sampled_from([1, 3, 32]),
    flush=st.booleans(),
)
def test_computed_scores_stay_within_the_bound(
    seed: int, case: tuple[Arithmetic, Format], regime: str, order: Order, D: int, H: int, flush: bool
) -> None:
    arithmetic, fmt = case
    rng = np.random.default_rng(seed)
    T, S = 4, 16
    q, k = draw(rng, (T, H, D), fmt, regime), draw(rng, (S, D), fmt, regime)
    w, scale = draw(rng, (T, H), FP32, regime), np.abs(draw(rng, (S,), FP32, "normal")) + 2.0**-20
    scale = round_to(scale, FP32)
    scores, bound = bounded_scores(q, k, w, scale, arithmetic=arithmetic)
    error = np.abs(computed_scores(q, k, w, scale, arithmetic, order, rng, flush=flush) - scores)
    assert (error <= bound).all(), f"worst ratio {(error / bound).max()}"
    np.testing.assert_allclose(scores, indexer_scores(q, k, w, scale), rtol=0, atol=float(bound.max()))


def worst_ratio(q: Array, k: Array, w: Array, scale: Array, arithmetic: Arithmetic) -> float:
    scores, bound = bounded_scores(q, k, w, scale, arithmetic=arithmetic)
    rng = np.random.default_rng(0)
    error = np.abs(computed_scores(q, k, w, scale, arithmetic, "forward", rng) - scores)
    assert (error <= bound).all()
    return float((error / bound).max())


def test_the_float32_dot_bound_is_nearly_reached() -> None:
    """1 + u' + u' + ...: each addition drops a little less than half a unit in the last place."""
    D = 128
    q = np.full((1, 1, D), round_to(2.0**-24 * 0.999, FP32))
    q[0, 0, 0] = 1
    assert worst_ratio(q, np.ones((1, D)), np.ones((1, 1)), np.ones(1), FLOAT32) > 0.9


def test_the_head_sum_bound_is_nearly_reached() -> None:
    H = 128
    w = np.full((1, H), round_to(2.0**-24 * 0.999, FP32))
    w[0, 0] = 1
    assert worst_ratio(np.ones((1, H, 1)), np.ones((1, 1)), w, np.ones(1), FLOAT32) > 0.9


def test_the_scale_bound_is_needed() -> None:
    """One head, one product: three roundings, of which the last is the scale's."""
    rng = np.random.default_rng(0)
    q, k = draw(rng, (256, 1, 1), FP32, "positive"), draw(rng, (256, 1), FP32, "positive")
    w, scale = draw(rng, (256, 1), FP32, "positive"), draw(rng, (256,), FP32, "positive")
    assert worst_ratio(q, k, w, scale, FLOAT32) > 0.7  # without the last it could not exceed 2/3


@pytest.mark.parametrize(("core", "fmt"), [(HOPPER_E4M3, E4M3), (TENSOR_CORE_16BIT, BF16)])
def test_the_tensor_core_bound_is_nearly_reached(core: TensorCore, fmt: Format) -> None:
    """One product of 1 in each block, and the rest just below the cut."""
    D = 128
    small = 2.0 ** -(core.alignment_bits // 2) * (2 - 2 * fmt.unit_roundoff)
    other = 2.0 ** -(core.alignment_bits - core.alignment_bits // 2 + 2) * (2 - 2 * fmt.unit_roundoff)
    q, k = np.full((1, 1, D), round_to(small, fmt)), np.full((1, D), round_to(other, fmt))
    q[..., 0 :: core.block] = 2.0**-4
    k[..., 0 :: core.block] = 2.0**4
    q[..., core.block :: core.block] = 2.0**-6  # so that the sum stays below 2
    k[..., core.block :: core.block] = 2.0**-1
    scores, bound = bounded_scores(q, k, np.ones((1, 1)), arithmetic=core)
    dot = tensor_core_dot(q[:, None], k[None, :, None], core, None)
    assert abs(dot.item() - scores.item()) <= bound.item()
    assert abs(dot.item() - scores.item()) > 0.4 * bound.item()


def test_a_negative_dot_product_may_be_computed_as_positive() -> None:
    """256 - 125 small products - 254 is -45.9 units of the last place, but every small product is cut off."""
    D, unit = 128, 2.0 ** (8 - HOPPER_E4M3.alignment_bits)
    q, k = np.full((1, 1, D), -1.875 * 2.0**-3), np.full((1, D), 1.875 * 2.0**-4)
    q[0, 0, [0, -2, -1]] = 16, -15, -14
    k[0, [0, -2, -1]] = 16, 16, 1
    dot = tensor_core_dot(q[:, None], k[None, :, None], HOPPER_E4M3, None).item()
    exact = (q[0, 0] * k[0]).sum()
    assert (exact / unit, dot / unit) == (pytest.approx(-45.9, abs=0.1), 64)
    scores, bound = bounded_scores(q, k, np.ones((1, 1)), arithmetic=HOPPER_E4M3)
    assert scores == 0
    assert dot <= bound.item() < 2 * dot, "relu hides the negative part of the error, and only that"


def test_the_underflow_bounds_are_needed() -> None:
    """Products just below 2**-126, flushed to zero: of the dot product, then of the head weights."""
    rng = np.random.default_rng(0)
    small, one = 2.0**-63 * (1 - 2.0**-7), np.ones(1)
    for q, k, w in (
        (np.full((1, 1, 128), small), np.full((1, 128), 2.0**-63), np.ones((1, 1))),
        (np.full((1, 128, 1), small), np.ones((1, 1)), np.full((1, 128), 2.0**-63)),
    ):
        scores, bound = bounded_scores(q, k, w, arithmetic=FLOAT32)
        assert computed_scores(q, k, w, one, FLOAT32, "forward", rng, flush=True) == 0
        assert 0.2 * bound <= scores <= bound


@pytest.mark.parametrize(
    ("arithmetic", "fmt", "relative"),
    [(FLOAT32, BF16, 2.0**-17), (TENSOR_CORE_16BIT, BF16, 2.0**-17), (HOPPER_E4M3, E4M3, 2.0**-8)],
)
def test_bounds_are_useful(arithmetic: Arithmetic, fmt: Format, relative: float) -> None:
    """On normal data the bound is a small part of the sum of magnitudes, so it decides most keys."""
    rng = np.random.default_rng(0)
    q, k, w = (
        draw(rng, (4, 32, 128), fmt, "normal"),
        draw(rng, (256, 128), fmt, "normal"),
        rng.random((4, 32)),
    )
    _, bound = bounded_scores(q, k, w, arithmetic=arithmetic)
    magnitude = np.einsum("th,thd,sd->ts", w, np.abs(q), np.abs(k))
    assert (bound / magnitude).mean() < relative


def test_the_fp8_model_errs_as_an_h200_does() -> None:
    """Normal data, D = 128: the largest error measured on an H200 is 2**-12.0 of the sum of magnitudes."""
    rng = np.random.default_rng(0)
    q, k = (draw(rng, (20_000, 128), E4M3, "normal") for _ in range(2))
    dot = tensor_core_dot(q, k, HOPPER_E4M3, rng)
    relative = np.abs(dot - (q * k).sum(axis=1)) / (np.abs(q) * np.abs(k)).sum(axis=1)
    assert 2.0**-13 < relative.max() < 2.0**-11.5


@pytest.mark.parametrize("arithmetic", [FLOAT32, TENSOR_CORE_16BIT, HOPPER_E4M3])
def test_plateaus_of_zeros_are_exact(arithmetic: Arithmetic) -> None:
    rng = np.random.default_rng(0)
    q, k = -np.abs(draw(rng, (2, 3, 64), E4M3, "positive")), np.abs(draw(rng, (5, 64), E4M3, "positive"))
    k[0] = 0
    w = np.ones((2, 3))
    assert (bounded_scores(q, k, w, arithmetic=arithmetic).bound == 0).all(), "relu of negative sums is 0"
    assert (bounded_scores(-q, k, 0 * w, arithmetic=arithmetic).bound == 0).all(), "weights are 0"
    bound = bounded_scores(-q, k, w, arithmetic=arithmetic).bound
    assert (bound[:, 0] == 0).all(), "a key of zeros"
    assert (bound[:, 1:] > 0).all()


def test_where_nothing_can_be_promised_the_bound_is_infinite() -> None:
    q, k, w = np.ones((1, 2, 4)), np.ones((3, 4)), np.ones((1, 2))

    def bound(q: Array, k: Array, w: Array, scale: Array | None = None) -> list[float]:
        result: list[float] = bounded_scores(q, k, w, scale, arithmetic=FLOAT32).bound[0].tolist()
        return result

    infinite = k.copy()
    infinite[1, 2] = -np.inf
    assert np.isinf(bound(q, infinite, w)).tolist() == [False, True, False]
    huge = k * np.array([[1], [1e38], [1]])
    assert np.isinf(bound(q, huge, w)).tolist() == [False, True, False], "a dot product of 4e38 overflows"
    assert np.isinf(bound(q, huge, np.array([[1.0, 0.0]]))).tolist() == [False, True, False], "even for w = 0"
    assert np.isinf(bound(q, k, w * 1e38)).all(), "the head sum overflows"
    assert np.isinf(bound(q, k, w, np.array([1, 1e38, 1]))).tolist() == [False, True, False]
    assert np.isinf(bound(q, k, np.array([[1.0, np.inf]]))).all()


def test_a_nan_operand_makes_a_score_surely_nan() -> None:
    q, k, w = np.ones((3, 2, 4)), np.ones((2, 4)), np.ones((3, 2))
    q[0, 1, 2] = k[1, 0] = w[1, 1] = np.nan
    scores, bound = bounded_scores(q, k, w, arithmetic=FLOAT32)
    assert np.isnan(scores).tolist() == [[True, True], [True, True], [False, True]]
    assert (bound[np.isnan(scores)] == 0).all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"k: shape \(3, 5\); allowed: \[S, 4\]"):
        bounded_scores(np.ones((1, 2, 4)), np.ones((3, 5)), np.ones((1, 2)), arithmetic=FLOAT32)
    with pytest.raises(ValueError, match=r"q: head size 8192; TensorCore.* has no useful bound"):
        bounded_scores(np.ones((1, 1, 8192)), np.ones((1, 8192)), np.ones((1, 1)), arithmetic=HOPPER_E4M3)
