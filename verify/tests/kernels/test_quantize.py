"""fp8 quantisation against exact rounding, and the score identity that lets scales leave the dot product."""

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyscale_kernels.quantize import (
    Quantized,
    head_weights,
    quantize,
    quantize_inputs,
    straight_through,
)
from hyscale_ref.formats import E4M3, encode
from hyscale_ref.scores import indexer_scores

ROW = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


def bits(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(x.view(torch.uint8).numpy())


@settings(max_examples=200, deadline=None)
@given(ROW, st.booleans())
@example([448.0, 1.0], True)
@example([448.0 * (1 + 2.0**-23)], True)
@example([1e-38], False)
@example([1e-45, 0.0], True)
def test_values_and_scales(row: list[float], power_of_two: bool) -> None:
    x = torch.tensor([row])
    values, scale = quantize(x, power_of_two=power_of_two)
    [s] = scale.tolist()
    largest = float(x.abs().max())
    assert scale.dtype == torch.float32
    assert 2.0**-126 <= s < math.inf
    if largest == 0:
        assert s == 1
    elif power_of_two:
        assert math.frexp(s)[0] == 0.5
        exact = max(largest / 448, 2.0**-126)
        assert exact * (1 - 2.0**-23) <= s < 2 * exact * (1 - 2.0**-24), "the next power of two"
    else:
        assert s == max(np.float32(largest) / np.float32(448), np.float32(2.0**-126))
    quotient = x.numpy() / scale[:, None].numpy()
    np.testing.assert_array_equal(bits(values), encode(quotient, E4M3, saturate=True))


@settings(max_examples=100, deadline=None)
@given(ROW, st.booleans())
def test_the_error_is_half_a_step(row: list[float], power_of_two: bool) -> None:
    """Relative error at most 2**-4 for normal e4m3 numbers, absolute at most 2**-10 scales below them."""
    values, scales = quantize(torch.tensor([row]), power_of_two=power_of_two)
    scale = float(scales[0])
    error = np.abs(values[0].double().numpy() * scale - np.array(row))
    assert (error <= np.maximum(np.abs(np.array(row)) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_special_values(power_of_two: bool) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[0.0, -0.0], [nan, 2.0], [inf, -3.0], [-inf, nan], [1e-40, 0.0], [3e38, -3e38]])
    values, scale = quantize(x, power_of_two=power_of_two)
    assert values.float().isnan().tolist() == (~x.isfinite()).tolist(), "NaN and infinities become NaN"
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert scale[[0, 3]].tolist() == [1, 1], "rows without a finite nonzero value"
    assert bits(values)[0].tolist() == [0, 128], "zeros keep their sign"
    assert values[4, 0].float() * scale[4] == pytest.approx(0, abs=2.0**-126), "far below the smallest scale"
    if not power_of_two:
        assert values.float()[1, 1] == 448
        assert values.float()[5].tolist() == [448, -448]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_quantised_inputs_are_those_of_the_dequantised(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(3, 4, 32).to(dtype), torch.randn(7, 32).to(dtype), torch.randn(3, 4).to(dtype)
    inputs = quantize_inputs(q, k, w, power_of_two=True)
    assert inputs.w.dtype == inputs.k_scale.dtype == torch.float32
    q8, k8, w8, k_scale = (x.double().numpy() for x in inputs)
    got = indexer_scores(q8, k8, w8, k_scale)
    q_near, k_near = (quantize(x, power_of_two=True).dequantize().double().numpy() for x in (q, k))
    np.testing.assert_allclose(got, indexer_scores(q_near, k_near, w.double().numpy()), rtol=1e-12)
    exact = indexer_scores(q.double().numpy(), k.double().numpy(), w.double().numpy())
    magnitude = np.einsum("th,thd,sd->ts", *(x.abs().double().numpy() for x in (w, q, k)))
    assert (np.abs(got - exact) <= 0.14 * magnitude).all(), "two roundings of 2**-4, and small numbers"


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(5, 16, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(5, 16)
    y = straight_through(x)
    assert torch.equal(y, quantize(x).dequantize())
    [gradient] = torch.autograd.grad(y, x, upstream)
    assert torch.equal(gradient, upstream.bfloat16())


def test_gradients_reach_the_weights_but_not_the_scales() -> None:
    q, k = torch.randn(2, 3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    w = torch.randn(2, 3, requires_grad=True)
    inputs = quantize_inputs(q, k, w)
    assert not inputs.q.requires_grad
    assert not inputs.k_scale.requires_grad
    gradients = torch.autograd.grad(inputs.w.sum(), (w, q), allow_unused=True)
    assert torch.equal(gradients[0], quantize(q).scale)
    assert gradients[1] is None


def test_head_weights() -> None:
    w = torch.randn(3, 32, dtype=torch.bfloat16)
    np.testing.assert_allclose(head_weights(w, 128).numpy(), w.float().numpy() / 64, rtol=1e-6)


def test_quantisation_compiles_to_the_same_bits() -> None:
    x = torch.randn(6, 16)
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    for power_of_two in (False, True):
        have, want = compiled(x, power_of_two=power_of_two), quantize(x, power_of_two=power_of_two)
        assert isinstance(have, Quantized)
        np.testing.assert_array_equal(bits(have.values), bits(want.values))
        assert torch.equal(have.scale, want.scale)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: quantize(torch.zeros(2, 3, dtype=torch.int8)),
            TypeError,
            r"x: dtype torch\.int8; allowed: float32",
        ),
        (lambda: quantize(torch.zeros(2, 3).double()), TypeError, r"x: dtype torch\.float64"),
        (lambda: quantize(cast(torch.Tensor, [1.0])), TypeError, r"x: list; allowed: torch\.Tensor"),
        (lambda: quantize(torch.tensor(1.0)), ValueError, r"x: shape \[\]; allowed: at least one axes"),
        (lambda: quantize(torch.zeros(2, 0)), ValueError, r"x: shape \[2, 0\]; allowed: a last axis"),
        (
            lambda: quantize_inputs(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(3, 2)),
            ValueError,
            r"w: shape \[3, 2\]; allowed with q \[2, 3, 4\]: \[2, 3\]",
        ),
        (
            lambda: quantize_inputs(torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(3, 2)),
            ValueError,
            r"q: shape \[2, 4\]; allowed: 3 axes",
        ),
        (lambda: head_weights(torch.zeros(2, 3), 0), ValueError, "head_dim: 0; allowed: 1 or more"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
