# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, no-check-untyped-defs
"""Streaming kernels as training frameworks fuse them, each one pass over memory, and a loop of fp32 FMAs.

They exist to be measured: PyTorch runs each of these as several kernels. All arithmetic is float32. Operands
are bf16 on a GPU; float32 under Triton's interpreter, which mishandles bf16.

Shape letters: N rows, W columns (width), V vocabulary.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.plan import ceil_div, next_power_of_2

BLOCK = 1024
TILE = 128  # rows and columns that share one fp8 scale
FP8_MAX = 448.0
ROTARY = 64  # elements of a head that rotate
FMA_CHAINS, FMA_UNROLL = 8, 32


@triton.jit
def _rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, W, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Row program_id(0), HEADS heads from program_id(1) * HEADS: halves (a, b) -> (a c - b s, b c + a s)."""
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, HALF)
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    place = o_h[:, None] * (2 * HALF) + o_i[None, :]
    inside = place < W
    c = tl.load(cos_ptr + row * HALF + o_i)[None, :]
    s = tl.load(sin_ptr + row * HALF + o_i)[None, :]
    a = tl.load(x_ptr + row * W + place, mask=inside, other=0).to(tl.float32)
    b = tl.load(x_ptr + row * W + place + HALF, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + row * W + place, (a * c - b * s).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + row * W + place + HALF, (b * c + a * s).to(out_ptr.dtype.element_ty), mask=inside)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [N, W], W a multiple of 64; cos, sin float32 [N, 32]."""
    N, W = x.shape
    out, heads = torch.empty_like(x), 16
    _rope_kernel[(N, ceil_div(W, ROTARY * heads))](x, cos, sin, out, W, HALF=ROTARY // 2, HEADS=heads)
    return out


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_w < W
    gate = tl.load(x_ptr + row * 2 * W + o_w, mask=inside, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * W + W + o_w, mask=inside, other=0).to(tl.float32)
    tl.store(
        out_ptr + row * W + o_w, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside
    )


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :W]) * x[:, W:] of x [N, 2 W]."""
    N, W = x.shape[0], x.shape[1] // 2
    out = x.new_empty((N, W))
    _swiglu_kernel[(N, ceil_div(W, BLOCK))](x, out, W, BLOCK=BLOCK)
    return out


@triton.jit
def _swiglu_backward_kernel(x_ptr, dy_ptr, dx_ptr, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_w < W
    gate = tl.load(x_ptr + row * 2 * W + o_w, mask=inside, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * W + W + o_w, mask=inside, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row * W + o_w, mask=inside, other=0).to(tl.float32)
    s = tl.sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    low = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + row * 2 * W + o_w, (dy * up * slope).to(low), mask=inside)
    tl.store(dx_ptr + row * 2 * W + W + o_w, (dy * gate * s).to(low), mask=inside)


def swiglu_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Gradient [N, 2 W] of :func:`swiglu` for dy [N, W]."""
    N, W = dy.shape
    dx = torch.empty_like(x)
    _swiglu_backward_kernel[(N, ceil_div(W, BLOCK))](x, dy, dx, W, BLOCK=BLOCK)
    return dx


@triton.jit
def _dropout_add_kernel(x_ptr, r_ptr, out_ptr, kept_ptr, N, seed, p, BLOCK: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_n < N
    x = tl.load(x_ptr + o_n, mask=inside, other=0).to(tl.float32)
    r = tl.load(r_ptr + o_n, mask=inside, other=0).to(tl.float32)
    kept = tl.rand(seed, o_n.to(tl.uint32)) >= p
    y = tl.where(kept, x / (1 - p), 0.0) + r
    tl.store(out_ptr + o_n, y.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(kept_ptr + o_n, kept.to(tl.int8), mask=inside)


def dropout_add(
    x: torch.Tensor, residual: torch.Tensor, p: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dropout(x) + residual, int8 mask of what was kept)."""
    out, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)
    _dropout_add_kernel[(ceil_div(x.numel(), BLOCK),)](
        x, residual, out, kept, x.numel(), seed, p, BLOCK=BLOCK
    )
    return out, kept


@triton.jit
def _dropout_backward_kernel(dy_ptr, kept_ptr, dx_ptr, N, p, BLOCK: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_n < N
    dy = tl.load(dy_ptr + o_n, mask=inside, other=0).to(tl.float32)
    kept = tl.load(kept_ptr + o_n, mask=inside, other=0)
    tl.store(dx_ptr + o_n, tl.where(kept != 0, dy / (1 - p), 0.0).to(dx_ptr.dtype.element_ty), mask=inside)


def dropout_backward(dy: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Gradient of the dropped operand; that of the residual is dy itself."""
    dx = torch.empty_like(dy)
    _dropout_backward_kernel[(ceil_div(dy.numel(), BLOCK),)](dy, kept, dx, dy.numel(), p, BLOCK=BLOCK)
    return dx


@triton.jit
def _quantise_kernel(x_ptr, rows_ptr, columns_ptr, r_scale_ptr, c_scale_ptr, N, W, TILE: tl.constexpr):
    """One TILE x TILE block: fp8 along rows, and transposed along columns, each with its own scales."""
    o_n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_w = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (o_n < N)[:, None] & (o_w < W)[None, :]
    wide = o_n.to(tl.int64)
    x = tl.load(x_ptr + wide[:, None] * W + o_w[None, :], mask=inside, other=0).to(tl.float32)
    size = tl.abs(x)
    r_scale = tl.maximum(tl.max(size, axis=1), 1e-12) / 448.0
    c_scale = tl.maximum(tl.max(size, axis=0), 1e-12) / 448.0
    low = rows_ptr.dtype.element_ty
    tl.store(rows_ptr + wide[:, None] * W + o_w[None, :], (x / r_scale[:, None]).to(low), mask=inside)
    tl.store(
        columns_ptr + o_w.to(tl.int64)[None, :] * N + o_n[:, None],
        (x / c_scale[None, :]).to(low),
        mask=inside,
    )
    tl.store(r_scale_ptr + tl.program_id(1) * N + o_n, r_scale, mask=o_n < N)
    tl.store(c_scale_ptr + tl.program_id(0) * W + o_w, c_scale, mask=o_w < W)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 of x [N, W] with a scale for each 128 elements along rows, and of its transpose likewise.

    Returns (x8 [N, W], xt8 [W, N], scales [W / 128, N], scales of the transpose [N / 128, W]); x equals
    x8 times its scale up to rounding. Under the interpreter the values stay float32.
    """
    N, W = x.shape
    low = torch.float8_e4m3fn if x.is_cuda else torch.float32
    rows, columns = x.new_empty((N, W), dtype=low), x.new_empty((W, N), dtype=low)
    r_scale = x.new_empty((ceil_div(W, TILE), N), dtype=torch.float32)
    c_scale = x.new_empty((ceil_div(N, TILE), W), dtype=torch.float32)
    _quantise_kernel[(ceil_div(N, TILE), ceil_div(W, TILE))](
        x, rows, columns, r_scale, c_scale, N, W, TILE=TILE, num_warps=16
    )
    return rows, columns, r_scale, c_scale


@triton.jit
def _cross_entropy_kernel(logits_ptr, target_ptr, loss_ptr, grad_ptr, V, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(logits_ptr + row * V + first + o_v, mask=first + o_v < V, other=float("-inf")).to(
            tl.float32
        )
        now = tl.maximum(top, x)
        # Lanes that have seen nothing yet: -inf - -inf would be NaN.
        safe = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = now
    peak = tl.max(top, axis=0)
    norm = tl.sum(total * tl.exp(top - peak), axis=0)
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits_ptr + row * V + target).to(tl.float32)
    tl.store(loss_ptr + row, tl.log(norm) + peak - chosen)
    for first in range(0, V, BLOCK):
        inside = first + o_v < V
        x = tl.load(logits_ptr + row * V + first + o_v, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - peak) / norm
        g = (p - tl.where(first + o_v == target, 1.0, 0.0)) * scale
        tl.store(grad_ptr + row * V + first + o_v, g.to(grad_ptr.dtype.element_ty), mask=inside)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss float32 [N], gradient [N, V] of their mean) of logits [N, V] for target int64 [N]."""
    N, V = logits.shape
    loss, grad = logits.new_empty(N, dtype=torch.float32), torch.empty_like(logits)
    block = min(4096, next_power_of_2(V))
    _cross_entropy_kernel[(N,)](logits, target, loss, grad, V, 1.0 / N, BLOCK=block, num_warps=8)
    return loss, grad


@triton.jit
def _adamw_kernel(
    g_ptr, m_ptr, v_ptr, master_ptr, out_ptr, N, lr, beta1, beta2, eps, decay, c1, c2, BLOCK: tl.constexpr
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o_n < N
    g = tl.load(g_ptr + o_n, mask=inside, other=0)
    m = beta1 * tl.load(m_ptr + o_n, mask=inside, other=0) + (1 - beta1) * g
    v = beta2 * tl.load(v_ptr + o_n, mask=inside, other=0) + (1 - beta2) * g * g
    p = tl.load(master_ptr + o_n, mask=inside, other=0)
    p = p * (1 - lr * decay) - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    tl.store(m_ptr + o_n, m, mask=inside)
    tl.store(v_ptr + o_n, v, mask=inside)
    tl.store(master_ptr + o_n, p, mask=inside)
    tl.store(out_ptr + o_n, p.to(out_ptr.dtype.element_ty), mask=inside)


def adamw(
    grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, master: torch.Tensor, out: torch.Tensor, step: int
) -> None:
    """One AdamW step of float32 m, v and master in place; ``out`` gets the bf16 parameters."""
    N, beta1, beta2 = grad.numel(), 0.9, 0.95
    _adamw_kernel[(ceil_div(N, BLOCK),)](
        grad, m, v, master, out, N, 1e-4, beta1, beta2, 1e-8, 0.1, 1 - beta1**step,
        1 - beta2**step, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _fma_kernel(x_ptr, out_ptr, rounds, CHAINS: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr):
    """CHAINS independent chains of fused multiply-adds a lane, UNROLL links a round."""
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_c = tl.arange(0, CHAINS)
    x = tl.load(x_ptr + o_n)
    acc = x[:, None] + o_c[None, :].to(tl.float32)
    slope = (x * 1e-3 + 0.9)[:, None]
    shift = (x * 1e-3)[:, None]
    for _ in range(rounds):
        for _ in tl.static_range(UNROLL):
            acc = tl.fma(acc, slope, shift)
    tl.store(out_ptr + o_n, tl.sum(acc, axis=1))


def fma(x: torch.Tensor, rounds: int) -> torch.Tensor:
    """Float32 multiply-adds in registers: x.numel() * rounds * FMA_CHAINS * FMA_UNROLL of them.

    x float32, a multiple of 128 elements; the result depends on every one of them.
    """
    out = torch.empty_like(x)
    _fma_kernel[(x.numel() // 128,)](
        x, out, rounds, CHAINS=FMA_CHAINS, UNROLL=FMA_UNROLL, BLOCK=128, num_warps=4
    )
    return out
