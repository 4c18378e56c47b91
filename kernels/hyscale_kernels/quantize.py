"""fp8 e4m3 inputs for the indexer: one scale a token, the queries' scales folded into the head weights.

relu is positively homogeneous, so the scale of a query head commutes with it and multiplies w, while the
scale of a key multiplies its score. With q ~ q8 * q_scale and k ~ k8 * k_scale,

    s[t, j] = k_scale[j] * sum_h (w[t, h] * q_scale[t, h]) * relu(q8[t, h] . k8[j])

is the score of the *dequantised* inputs, and gradients are with respect to those: rounding counts as the
identity (straight through), scales count as constants.

Shape letters: T queries, S keys, H heads, D head size. Nothing here synchronises with the device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

E4M3_MAX = 448.0
SMALLEST_NORMAL = 2.0**-126  # of float32: a smaller scale would lose bits, or be 0

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Quantized(NamedTuple):
    """Rows as ``values`` * ``scale``: float8_e4m3fn [..., D] and float32 [...]."""

    values: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The represented rows, float32 [..., D], rounded once (not at all for power-of-two scales).

        A number within one e4m3 step of float32's largest may have been rounded up beyond it: infinity.
        """
        return self.values.float() * self.scale[..., None]


class QuantizedInputs(NamedTuple):
    """fp8 inputs of ``hytopk``: q, k float8_e4m3fn; w float32 with q's scales; k_scale float32."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    k_scale: torch.Tensor


def quantize(x: torch.Tensor, *, power_of_two: bool = False) -> Quantized:
    """Round the rows of ``x`` [..., D] (float32, bfloat16 or float16) to e4m3 with one scale a row.

    The scale maps the row's largest finite magnitude to 448, the largest e4m3 number; with ``power_of_two``
    it is the next power of two (what the ue8m0 format can hold), and dividing by it is exact. It is always
    positive, finite and normal; a row of zeros has the scale 1. Values are divided in float32, then rounded
    to nearest, ties to even. NaN stays NaN, and infinities become NaN because e4m3 has none: such a key
    scores NaN, so HyTopK never selects it and counts it.

    The result carries no gradient (see :func:`straight_through`). Raises TypeError for another dtype.
    """
    x = _check("x", x).detach().float()
    finite = x.isfinite()
    if x.shape[-1] == 0:
        raise ValueError(f"x: shape {list(x.shape)}; allowed: a last axis that is not empty")
    largest = x.abs().masked_fill(~finite, 0).amax(dim=-1)
    scale = (largest / E4M3_MAX).clamp(min=SMALLEST_NORMAL)
    if power_of_two:
        scale = _round_up_to_power_of_two(scale)
    scale = scale.masked_fill(largest == 0, 1)
    values = (x / scale[..., None]).masked_fill(~finite, torch.nan)  # at most 448 (1 + 2**-23): rounds to 448
    return Quantized(values.to(torch.float8_e4m3fn), scale)


def quantize_inputs(
    q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, *, power_of_two: bool = False
) -> QuantizedInputs:
    """fp8 inputs of ``hytopk`` from q [T, H, D], k [S, D] and w [T, H] (each float32, bf16 or fp16).

    q is scaled for each token and head, k for each token. The returned w is float32 and differentiable in
    ``w``; q and k carry no gradient. NaN and infinities as in :func:`quantize`.
    """
    _check("q", q, 3)
    _check("k", k, 2)
    _check("w", w, 2)
    if w.shape != q.shape[:2]:
        raise ValueError(f"w: shape {list(w.shape)}; allowed with q {list(q.shape)}: {list(q.shape[:2])}")
    q8, q_scale = quantize(q, power_of_two=power_of_two)
    k8, k_scale = quantize(k, power_of_two=power_of_two)
    return QuantizedInputs(q8, k8, w.float() * q_scale, k_scale)


def head_weights(w: torch.Tensor, head_dim: int) -> torch.Tensor:
    """w [T, H] times H**-0.5 * D**-0.5, in float32: the factors that models apply to an indexer's scores."""
    _check("w", w, 2)
    if head_dim < 1:
        raise ValueError(f"head_dim: {head_dim}; allowed: 1 or more")
    return w.float() / math.sqrt(max(w.shape[1], 1) * head_dim)


def straight_through(x: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """``quantize(x).dequantize()`` with the gradient of the identity, float32 [..., D].

    For a training path in plain PyTorch that sees exactly the numbers which the fp8 kernels see.
    """
    apply: Callable[[torch.Tensor, bool], torch.Tensor] = _StraightThrough.apply
    return apply(_check("x", x), power_of_two)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power_of_two: bool) -> torch.Tensor:
        ctx.dtype = x.dtype
        return quantize(x, power_of_two=power_of_two).dequantize()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def _round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 up to the next power of two: the fraction carries into the exponent."""
    bits = scale.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _check(name: str, value: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {type(value).__name__}; allowed: torch.Tensor")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: dtype {value.dtype}; allowed: float32, bfloat16, float16")
    if value.dim() == 0 or (rank is not None and value.dim() != rank):
        raise ValueError(f"{name}: shape {list(value.shape)}; allowed: {rank or 'at least one'} axes")
    return value
