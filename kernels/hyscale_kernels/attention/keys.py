"""Backward, last: the gradient of the latent keys, scattered.

    dlatent[j] = sum_t (sum_h da[t, h, j] q[t, h]  +  [sum_h p[t, h, j] grad[t, h], 0])

A program takes one row, a block of heads and a block of columns. Heads are summed by the tensor cores, so
that a row adds one vector to each of its keys. All rows of a chunk do one block of columns before the next:
what they add to is then a narrow slice of the table, which may stay in the second-level cache.

atomic       float32 additions in whatever order they arrive: the fastest, and not repeatable bit for bit.
fixed point  integer additions of multiples of a step that belongs to the key: integer addition commutes, so
             the sum does not depend on the order. Two neighbouring columns share one 64-bit addition, the
             left one in the low half: the low half's borrows are exact, and are undone when the sums settle.

Shape letters: T queries, S keys, K places of a row, Hq query heads, D key size, Dv value size; N keys of one
step, R rows of a chunk.
"""

import torch
import triton
import triton.language as tl

from ..hytopk.plan import ceil_div, next_power_of_2
from ..hytopk.score import dot
from .plan import AttentionPlan
from .queries import load_columns, load_weights
from .recompute import Weights
from .tiles import Call, add_dot, load_places, row_end


@triton.jit(do_not_specialize=["K", "S", "row0", "zero"])
def _keys_kernel(
    q_ptr,
    index_ptr,
    grad_ptr,
    p_ptr,
    da_ptr,
    grid_ptr,
    dkv_ptr,
    K,
    S,
    q_stride_t,
    q_stride_h,
    row0,
    zero,
    HQ: tl.constexpr,
    D: tl.constexpr,
    VALUE: tl.constexpr,
    SEARCH: tl.constexpr,
    FIXED: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds what the chunk's row program_id(0) // BLOCKS, HEADS heads, adds to COLUMNS columns from
    program_id(1) on."""
    BLOCKS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    PAIRS: tl.constexpr = (D + 1) // 2
    program = tl.program_id(0).to(tl.int64)
    r = program // BLOCKS
    row = row0 + r
    heads = program % BLOCKS * HEADS + tl.arange(0, HEADS)
    live = heads < HQ
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    p_index = index_ptr + row * K
    b_q = load_columns(q_ptr + row * q_stride_t, heads, q_stride_h, live, columns, D)
    b_grad = load_columns(grad_ptr, row * HQ + heads, VALUE, live, columns, VALUE)
    for i in tl.range(0, row_end(p_index, K, SEARCH), N, num_stages=STAGES):
        place = i + tl.arange(0, N)
        keys, used, _ = load_places(p_index, place, K, S)
        b_da = load_weights(da_ptr, r, place, heads, live, K, HQ)
        b_p = load_weights(p_ptr, r, place, heads, live, K, HQ)
        added = add_dot(dot(b_da, b_q), b_p, b_grad)
        if FIXED:
            grid = tl.load(grid_ptr + keys, mask=used, other=0.0)
            scaled = tl.where((grid == grid)[:, None], added * grid[:, None], 0.0)
            steps = tl.floor(scaled + 0.5).to(tl.int32).to(tl.int64)
            left, right = tl.split(tl.reshape(steps, (N, COLUMNS // 2, 2)))
            pairs = first // 2 + tl.arange(0, COLUMNS // 2)
            # An unknown offset hides the alignment: one pair a lane, so that a warp's additions fill whole
            # sectors (vectors of integers cannot be added atomically).
            pointers = dkv_ptr + zero + keys[:, None] * PAIRS + pairs[None, :]
            mask = used[:, None] & (pairs < PAIRS)[None, :]
            tl.atomic_add(pointers, left + (right << 32), mask=mask, sem="relaxed")
        else:
            mask = used[:, None] & (columns < D)[None, :]
            tl.atomic_add(dkv_ptr + keys[:, None] * D + columns[None, :], added, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["S"])
def _settle_kernel(
    sum_ptr, grid_ptr, dkv_ptr, S, ADD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr
):
    """float32 dkv of ROWS keys a program from their fixed-point sums; ADD adds to what is there."""
    keys = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    live = keys < S
    mask = live[:, None] & (columns < D)[None, :]
    p_sum = sum_ptr + keys[:, None] * (D + D % 2) + columns[None, :]
    steps = tl.load(p_sum, mask=mask, other=0)
    left = tl.load(p_sum - 1, mask=mask & (columns % 2 == 1)[None, :], other=0)
    steps += (left < 0).to(tl.int32)  # a negative left half has borrowed one from the right
    step = 1.0 / tl.load(grid_ptr + keys, mask=live, other=1.0)
    value = steps.to(tl.float32) * step[:, None]
    offsets = keys[:, None] * D + columns[None, :]
    if ADD:
        value += tl.load(dkv_ptr + offsets, mask=mask, other=0.0)
    tl.store(dkv_ptr + offsets, value, mask=mask)


def new_sums(call: Call) -> torch.Tensor:
    """Zeros int64 [S, pairs of columns] for the fixed-point sums."""
    S, D = call.latent.shape
    return torch.zeros((S, ceil_div(D, 2)), dtype=torch.int64, device=call.q.device)


def launch_keys(
    call: Call,
    grad: torch.Tensor,
    weights: Weights,
    grid: torch.Tensor | None,
    dkv: torch.Tensor,
    row0: int,
    rows: int,
    plan: AttentionPlan,
) -> None:
    """Add the contributions of ``rows`` rows from row0 on, whose weights these are, to dkv: float32 [S, D],
    or ``new_sums`` with the steps per unit ``grid`` [S]."""
    _, Hq, D = call.q.shape
    K, S, _, q_stride_t, q_stride_h, _ = call.numbers()
    _keys_kernel[(rows * call.programs(plan.heads), ceil_div(D, plan.dkv_columns))](
        call.q,
        call.indices,
        grad,
        *weights,
        weights.p if grid is None else grid,
        dkv,
        K,
        S,
        q_stride_t,
        q_stride_h,
        row0,
        0,
        HQ=Hq,
        D=D,
        VALUE=call.value_dim,
        SEARCH=call.constants()["SEARCH"],
        FIXED=grid is not None,
        HEADS=plan.heads,
        COLUMNS=plan.dkv_columns,
        N=plan.dkv_keys,
        STAGES=plan.dkv_stages,
        num_warps=plan.dkv_warps,
    )


def launch_settle(sums: torch.Tensor, grid: torch.Tensor, dkv: torch.Tensor, add: bool) -> None:
    """dkv float32 [S, D], overwritten or added to, from fixed-point sums and steps per unit [S]."""
    S, D = dkv.shape
    D_PAD = next_power_of_2(D)
    rows = max(1, 2048 // D_PAD)
    _settle_kernel[(ceil_div(S, rows),)](
        sums.view(torch.int32), grid, dkv, S, ADD=add, D=D, D_PAD=D_PAD, ROWS=rows
    )
