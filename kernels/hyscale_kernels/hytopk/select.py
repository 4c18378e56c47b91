"""Stage 5, selection: the exact K best of a row's candidates, ties by smaller key, ascending.

The K-th best score is found by bisection (rank.py); keys above it are all taken, keys equal to it are
taken from the left until K are reached. The candidates are sorted by key, so one cumulative sum gives
both the tie rule and the ascending order of the result.

A row is left pending for repair when its buffer overflowed, or when fewer than K candidates came
through although the window holds more.
"""

import torch
import triton
import triton.language as tl

from .plan import ROW_WARPS, Plan, ceil_div
from .problem import Problem, Results
from .rank import best, place, row_pointer


@triton.jit(do_not_specialize=["row0", "R", "capacity", "top_k"])
def _select_kernel(
    candidate_ptr,
    key_ptr,
    filled_ptr,
    threshold_ptr,
    lo_ptr,
    hi_ptr,
    index_ptr,
    count_ptr,
    score_ptr,
    nan_ptr,
    pending_ptr,
    row0,
    R,
    capacity,
    top_k,
    WITH_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Result of ROWS rows a program, and whether each is pending for repair."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    rows = (row0 + o_r).to(tl.int64)
    lo = tl.load(lo_ptr + rows)
    hi = tl.load(hi_ptr + rows)
    filled = tl.load(filled_ptr + o_r)
    whole = filled <= capacity
    last = tl.where(whole, filled, 0)
    p_row = row_pointer(key_ptr, o_r, capacity, BLOCK)[:, None]
    present, bar, room = best(p_row, last, top_k, ROWS, BLOCK)
    count = tl.minimum(present, top_k)
    # With a threshold of -inf every key of the window is a candidate: few of them is no miss.
    complete = tl.load(threshold_ptr + o_r) == float("-inf")
    pending = ~whole | ((count < tl.minimum(hi - lo, top_k)) & ~complete)
    count = tl.where(pending, 0, count)
    p_index = index_ptr + rows[:, None] * top_k
    p_score = score_ptr + rows[:, None] * top_k
    p_held = row_pointer(candidate_ptr, o_r, capacity, BLOCK)[:, None]
    place(p_row, p_held, last, bar, room, live & ~pending, p_index, p_score, WITH_SCORES, ROWS, BLOCK)
    for i in range(tl.min(count), top_k, BLOCK):
        o_k = (i + tl.arange(0, BLOCK))[None, :]
        tail = live[:, None] & (o_k >= count[:, None]) & (o_k < top_k)
        tl.store(p_index + o_k, -1, mask=tail)
        if WITH_SCORES:
            tl.store(p_score + o_k, float("-inf"), mask=tail)
    tl.store(count_ptr + rows, count, mask=live)
    tl.store(nan_ptr + rows, last - present, mask=live)
    tl.store(pending_ptr + rows, pending.to(tl.int32), mask=live)


def launch_select(
    problem: Problem,
    candidates: torch.Tensor,
    keys: torch.Tensor,
    filled: torch.Tensor,
    threshold: torch.Tensor,
    results: Results,
    row0: int,
    top_k: int,
    plan: Plan,
) -> None:
    """Write the results of rows row0 .. row0+R-1; candidates, keys, filled and threshold are the chunk's."""
    R = filled.shape[0]
    _select_kernel[(ceil_div(R, plan.row_group),)](
        candidates,
        keys,
        filled,
        threshold,
        problem.lo,
        problem.hi,
        *results.pointers(),
        row0,
        R,
        plan.capacity,
        top_k,
        WITH_SCORES=results.scores is not None,
        ROWS=plan.row_group,
        BLOCK=plan.columns(),
        num_warps=ROW_WARPS,
        maxnreg=64,
    )
