"""Backward, the scatter: dk[j] = sum_t c[t, j] sum_h m[t, h, j] w[t, h] q[t, h].

A program takes one row's keys of one chunk; programs run chunk by chunk, so that the part of dk which they
add to stays in the second-level cache: otherwise every addition would read and write device memory. The head
sum is a tensor-core product of the sign bits with w q in two bfloat16 terms.

atomic       float32 additions in whatever order they arrive: the fastest, and not repeatable bit for bit.
fixed point  int32 additions of multiples of a step that belongs to the key: integer addition commutes, so
             the sum does not depend on the order. The step is the smallest power of two for which the sum
             cannot overflow, found from the largest bound of a contribution and their number.

Shape letters: T queries, S keys, H heads, D head size, K places of a row, N places of one step, B sign words.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.plan import ceil_div, next_power_of_2
from ..hytopk.problem import Problem
from ..hytopk.score import INTERPRET, dot
from .plan import IndexerPlan
from .rows import Contributions, coefficients, narrow, upper
from .selected import keys_of, load_index

# Fixed-point sums stay below 2**30 steps in magnitude, bounds and rounding included below 2**31.
SUM_BITS = tl.constexpr(30)


@triton.jit(do_not_specialize=["S"])
def _grid_kernel(peak_ptr, hit_ptr, S, BLOCK: tl.constexpr):
    """Replaces the peak of each key by its steps per unit, a power of two as float32.

    The bounds add up to less than 2**(e + 1) for the exponent e of peak * hits. Steps below 2**-126 are not
    used; where the sum of the bounds passes float32 there is no step, but NaN.
    """
    keys = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = keys < S
    peak = tl.load(peak_ptr + keys, mask=mask, other=0)
    hits = tl.load(hit_ptr + keys, mask=mask, other=0)
    total = (peak.to(tl.float32, bitcast=True) * hits.to(tl.float32)).to(tl.int32, bitcast=True)
    exponent = ((total >> 23) & 0xFF) - 127
    biased = tl.minimum(SUM_BITS - 1 - exponent, 126) + 127
    tl.store(peak_ptr + keys, tl.where(exponent < 128, biased << 23, 0x7FC00000), mask=mask)


@triton.jit
def _weighted_heads(
    p_q, p_w, q_stride_h,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, LOWER: tl.constexpr,
):  # fmt: skip
    """w q of a row as [H_PAD, D_PAD]: its upper bfloat16 term, or what that term leaves."""
    o_h = tl.arange(0, H_PAD)[:, None]
    o_d = tl.arange(0, D_PAD)[None, :]
    mask = (o_h < H) & (o_d < D)
    b_q = tl.load(p_q + o_h * q_stride_h + o_d, mask=mask, other=0.0).to(tl.float32)
    product = b_q * tl.load(p_w + o_h, mask=o_h < H, other=0.0)
    if LOWER:
        return narrow(product - upper(product))
    else:
        return narrow(upper(product))


@triton.jit(do_not_specialize=["row0", "R", "K", "C", "chunk_keys"])
def _spans_kernel(
    index_ptr,
    span_ptr,
    row0,
    R,
    K,
    C,
    chunk_keys,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    C_PAD: tl.constexpr,
):
    """How many keys of each row lie below each of the C + 1 chunk boundaries, by bisection; 2**SEARCH > K."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < R
    r = tl.minimum(r, R - 1)
    o_c = tl.arange(0, C_PAD)[None, :]
    # In int64: the last boundary may lie beyond 2**31.
    boundary = o_c.to(tl.int64) * chunk_keys
    below = tl.zeros((ROWS, C_PAD), tl.int32)
    for step in tl.static_range(SEARCH):
        probe = below + ((1 << SEARCH) >> (step + 1))
        index = tl.load(index_ptr + (row0 + r) * K + probe - 1, mask=probe <= K, other=-1)
        below = tl.where((index >= 0) & (index < boundary), probe, below)
    tl.store(span_ptr + r * (C + 1) + o_c, below, mask=live & (o_c <= C))


def launch_spans(indices: torch.Tensor, num_keys: int, row0: int, R: int, plan: IndexerPlan) -> torch.Tensor:
    """int32 [R, C + 1] of rows row0 .. row0+R-1: the places [c], [c + 1] enclose the keys of chunk c."""
    K, C = indices.shape[1], plan.chunks(num_keys)
    spans = torch.empty((R, C + 1), dtype=torch.int32, device=indices.device)
    columns = next_power_of_2(C + 1)
    rows = max(1, 256 // columns)
    _spans_kernel[(ceil_div(R, rows),)](
        indices, spans, row0, R, K, C, plan.chunk_keys, SEARCH=K.bit_length(), ROWS=rows, C_PAD=columns
    )
    return spans


@triton.jit(do_not_specialize=["row0", "K", "S", "C", "zero"])
def _scatter_kernel(
    q_ptr,
    w_ptr,
    k_scale_ptr,
    index_ptr,
    grad_ptr,
    sign_ptr,
    span_ptr,
    grid_ptr,
    dk_ptr,
    row0,
    K,
    S,
    C,
    zero,
    q_stride_t,
    q_stride_h,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
    FIXED: tl.constexpr,
    N: tl.constexpr,
):
    """Adds row row0 + program_id(0)'s contributions to the keys of chunk program_id(1); q is of row0 on."""
    r = tl.program_id(0).to(tl.int64)
    row = row0 + r
    p_span = span_ptr + r * (C + 1) + tl.program_id(1)
    first = tl.load(p_span)
    last = tl.load(p_span + 1)
    LANES: tl.constexpr = 32 if H_PAD > 32 else H_PAD
    B: tl.constexpr = H_PAD // LANES
    if first < last:
        o_h = tl.arange(0, H_PAD)
        o_d = tl.arange(0, D_PAD)
        p_q, p_w = q_ptr + r * q_stride_t, w_ptr + row * w_stride_t
        b_high = _weighted_heads(p_q, p_w, q_stride_h, H, H_PAD, D, D_PAD, False)
        b_low = _weighted_heads(p_q, p_w, q_stride_h, H, H_PAD, D, D_PAD, True)
        for i in tl.range(first, last, N, num_stages=1):  # one or two steps: nothing to overlap
            place = i + tl.arange(0, N)
            index = load_index(index_ptr + row * K, place, last)
            keys, used = keys_of(index, S)
            c = coefficients(grad_ptr + row * K, k_scale_ptr, keys, place, used, HAS_SCALE)
            p_sign = sign_ptr + (r * K + place)[:, None] * B + (o_h // LANES)[None, :]
            sign = (tl.load(p_sign, mask=used[:, None], other=0) >> (o_h % LANES)[None, :]) & 1
            b_sign = narrow(sign.to(tl.float32))
            added = (dot(b_sign, b_high) + dot(b_sign, b_low)) * c[:, None]
            added = tl.where((c != 0.0)[:, None], added, 0.0)
            p_dk = dk_ptr + index.to(tl.int64)[:, None] * D + o_d[None, :]
            if FIXED:
                grid = tl.load(grid_ptr + keys, mask=used, other=0.0)
                grid = tl.where(grid == grid, grid, 0.0)
                steps = tl.floor(added * grid[:, None] + 0.5).to(tl.int32)
                # Unused places have no steps. An unknown offset hides the alignment: one column a lane, so
                # that a warp's additions fill whole sectors (vectors of integers cannot be added atomically).
                tl.atomic_add(p_dk + zero, steps, mask=(steps != 0) & (o_d < D)[None, :], sem="relaxed")
            else:
                tl.atomic_add(p_dk, added, mask=used[:, None] & (o_d < D)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["S"])
def _settle_kernel(
    sum_ptr,
    grid_ptr,
    dk_ptr,
    S,
    ADD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dk of ROWS keys a program from their fixed-point sums; ADD adds to what is there."""
    keys = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, D_PAD)
    live = keys < S
    step = 1.0 / tl.load(grid_ptr + keys, mask=live, other=1.0)
    mask = live[:, None] & (o_d < D)[None, :]
    offsets = keys[:, None] * D + o_d[None, :]
    value = tl.load(sum_ptr + offsets, mask=mask, other=0).to(tl.float32) * step[:, None]
    if ADD:
        value += tl.load(dk_ptr + offsets, mask=mask, other=0.0)
    tl.store(dk_ptr + offsets, value, mask=mask)


def launch_grid(contributions: Contributions) -> torch.Tensor:
    """Steps per unit of each key, float32 [S]; takes the place of the peaks."""
    peak, hits = contributions.peak, contributions.hits
    assert peak is not None
    _grid_kernel[(ceil_div(peak.shape[0], 1024),)](peak, hits, peak.shape[0], BLOCK=1024)
    return peak.view(torch.float32)


def launch_scatter(
    problem: Problem,
    indices: torch.Tensor,
    grad: torch.Tensor,
    signs: torch.Tensor,
    grid: torch.Tensor | None,
    dk: torch.Tensor,
    row0: int,
    plan: IndexerPlan,
) -> None:
    """Add the contributions of the rows from row0 on to dk [S, D]: float32, or int32 steps of ``grid``."""
    R, C = signs.shape[0], plan.chunks(problem.num_keys)
    spans = launch_spans(indices, problem.num_keys, row0, R, plan)
    _, _, w, k_scale = problem.pointers()
    q = problem.q[row0 : row0 + R]
    if q.dtype == torch.float8_e4m3fn:  # once, not for every chunk
        q = q.to(torch.float32 if INTERPRET else torch.bfloat16)
    _scatter_kernel[(R, C)](
        q,
        w,
        k_scale,
        indices,
        grad,
        signs,
        spans,
        grad if grid is None else grid,
        dk,
        row0,
        indices.shape[1],
        problem.num_keys,
        C,
        0,
        q.stride(0),
        q.stride(1),
        problem.w.stride(0),
        **problem.constants(),
        H_PAD=problem.padded_heads(),
        FIXED=grid is not None,
        N=plan.scatter_keys,
        num_warps=plan.scatter_warps,
    )


def launch_settle(steps: torch.Tensor, grid: torch.Tensor, dk: torch.Tensor, add: bool) -> None:
    """dk [S, D], overwritten or added to, from fixed-point sums int32 [S, D] and steps per unit [S]."""
    S, D = steps.shape
    D_PAD = next_power_of_2(D)
    rows = max(1, 2048 // D_PAD)
    _settle_kernel[(ceil_div(S, rows),)](steps, grid, dk, S, ADD=add, D=D, D_PAD=D_PAD, ROWS=rows)
