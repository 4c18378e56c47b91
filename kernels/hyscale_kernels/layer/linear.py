"""Projections: float32 parameters, products in the activations' dtype, rows in blocks of one size.

A library picks its kernel, and with it the order of a sum, by the shape of a product. In blocks of
``row_block`` rows every product has one shape, so that a row's result is the same, bit for bit, however many
rows (or ranks) there are. The backward pass needs no such thing and runs in one piece.

Shape letters: T rows, H heads, I and O input and output size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .rotary import rotate, rotate_back


class Linear(nn.Module):
    """x [T, I] to [T, O], without a bias; ``weight`` [O, I] float32, drawn with variance 1 / I."""

    def __init__(self, inputs: int, outputs: int, row_block: int | None = None) -> None:
        super().__init__()
        self.row_block = row_block
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        if self.row_block is None:
            return functional.linear(x, weight)
        return _apply(_RowBlocks, x, weight, self.row_block)


class HeadLinear(nn.Module):
    """x [T, H, I] to [T, H, O], one product a head; ``weight`` [H, I, O] float32."""

    def __init__(self, heads: int, inputs: int, outputs: int, row_block: int | None = None) -> None:
        super().__init__()
        self.row_block = row_block
        self.weight = nn.Parameter(torch.randn(heads, inputs, outputs) * inputs**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(_PerHead, x, self.weight.to(x.dtype), self.row_block)


class Absorb(HeadLinear):
    """Queries in the latent's space: x [T, H, I + R] to [T, H, O + R], R rotary elements at the end.

    The leading I elements of a head go through its key up-projection ``weight`` [H, I, O]; the others are
    rotated. Both are written where attention reads them.
    """

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _apply(_Absorb, x, self.weight.to(x.dtype), cos, sin, self.row_block)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last axis, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, self.weight.shape, weight, bias, self.eps)


class _RowBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, row_block: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty((x.shape[0], weight.shape[0]))
        for rows in _blocks(x.shape[0], row_block):
            torch.mm(x[rows], weight.T, out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dw = grad.T @ x if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _PerHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, row_block: int | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty((*x.shape[:2], weight.shape[2]))
        _product(x, weight, out, row_block)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            _product(grad, weight.mT, dx, None)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(x.permute(1, 2, 0), grad.transpose(0, 1))
        return dx, dw, None


class _Absorb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        row_block: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        inputs, outputs = weight.shape[1:]
        out = x.new_empty((*x.shape[:2], outputs + x.shape[2] - inputs))
        _product(x[..., :inputs], weight, out[..., :outputs], row_block)
        out[..., outputs:] = rotate(x[..., inputs:], cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        x, weight, cos, sin = ctx.saved_tensors
        inputs, outputs = weight.shape[1:]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            _product(grad[..., :outputs], weight.mT, dx[..., :inputs], None)
            dx[..., inputs:] = rotate_back(grad[..., outputs:], cos, sin)
        if ctx.needs_input_grad[1]:
            dw = torch.bmm(x[..., :inputs].permute(1, 2, 0), grad[..., :outputs].transpose(0, 1))
        return dx, dw, None, None, None


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, row_block: int | None) -> None:
    """out[t, h] = x[t, h] @ weight[h]; ``x`` [T, H, I] and ``out`` [T, H, O] may be parts of wider rows."""
    for rows in _blocks(x.shape[0], row_block or x.shape[0]):
        torch.bmm(x[rows].transpose(0, 1), weight, out=out[rows].transpose(0, 1))


def _blocks(size: int, step: int) -> Iterator[slice]:
    for low in range(0, size, step):
        yield slice(low, min(low + step, size))


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = function.apply
    return apply(*inputs)
