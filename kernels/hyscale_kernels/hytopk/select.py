"""Stage 5, selection: the exact K best of a row's candidates, ties by smaller key, ascending.

The K-th best score is found by bisection over ordered int32 scores; keys above it are all taken, keys
equal to it are taken from the left until K are reached. The candidates are sorted by key, so one
cumulative sum gives both the tie rule and the ascending order of the result.

A row is left pending for repair when its buffer overflowed, or when fewer than K candidates came
through although the window holds more.

Short contexts (no more keys than the buffer holds candidates) skip the stages before: their scores are
small enough to keep, and selection reads them as a table.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan, ceil_div
from .problem import Problem, Results
from .score import NEVER, ordered, unordered


@triton.jit
def cut(key, top_k):
    """Which of the ordered scores ``key`` [ROWS, C] (NEVER where there is none) are the top_k best.

    Columns are keys in ascending order. Returns (taken [ROWS, C] bool, position [ROWS, C] of each taken
    column among the taken, count [ROWS], last [ROWS]: the smallest taken score).
    """
    some = key != NEVER
    present = tl.sum(some.to(tl.int32), axis=1)
    # Invariant: reach >= top_k columns have a score of low or more (rows with more than top_k columns).
    reach = present
    low = tl.min(tl.where(some, key, 2**31 - 1), axis=1)
    high = tl.max(key, axis=1)
    low = tl.where(present > top_k, low, NEVER)
    while tl.max(((low < high) & (reach > top_k)).to(tl.int32)) > 0:
        middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), axis=1)
        searching = (low < high) & (reach > top_k)
        up = searching & (count >= top_k)
        high = tl.where(searching & (count < top_k), middle - 1, high)
        low = tl.where(up, middle, low)
        reach = tl.where(up, count, reach)
    above = key > low[:, None]
    equal = (key == low[:, None]) & some
    room = top_k - tl.sum(above.to(tl.int32), axis=1)
    # One cumulative sum for both: columns above in the low half of the word, equal ones in the high.
    ranks = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=1)
    ranks_equal = ranks >> 16
    taken = above | (equal & (ranks_equal <= room[:, None]))
    position = (ranks & 0xFFFF) + tl.minimum(ranks_equal, room[:, None]) - 1
    last = tl.min(tl.where(taken, key, 2**31 - 1), axis=1)
    return taken, position, tl.minimum(present, top_k), last


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
    TABLE: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Result of ROWS rows a program, and whether each is pending for repair.

    With TABLE, key_ptr is the score table float32 [R, capacity], and candidate_ptr and threshold_ptr
    are not read.
    """
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    rows = (row0 + o_r).to(tl.int64)
    lo = tl.load(lo_ptr + rows)
    hi = tl.load(hi_ptr + rows)
    o_c = tl.arange(0, C)
    offsets = o_r.to(tl.int64)[:, None] * capacity + o_c[None, :]
    if TABLE:
        mask = live[:, None] & (o_c[None, :] >= lo[:, None]) & (o_c[None, :] < hi[:, None])
        key = tl.where(mask, ordered(tl.load(key_ptr + offsets, mask=mask, other=0.0)), NEVER)
        index = tl.broadcast_to(o_c[None, :], (ROWS, C))
        taken, position, count, _ = cut(key, top_k)
        pending = tl.zeros((ROWS,), tl.int1)
        tl.store(filled_ptr + o_r, hi - lo, mask=live)
    else:
        filled = tl.load(filled_ptr + o_r)
        whole = filled <= capacity
        mask = (whole & live)[:, None] & (o_c[None, :] < filled[:, None])
        key = tl.load(key_ptr + offsets, mask=mask, other=NEVER)
        index = tl.load(candidate_ptr + offsets, mask=mask, other=0)
        taken, position, count, _ = cut(key, top_k)
        # With a threshold of -inf every key of the window is a candidate: few of them is no miss.
        complete = tl.load(threshold_ptr + o_r) == float("-inf")
        pending = (~whole) | ((count < tl.minimum(hi - lo, top_k)) & ~complete)
    nans = tl.sum((mask & (key == NEVER)).to(tl.int32), axis=1)
    taken = taken & ~pending[:, None]
    count = tl.where(pending, 0, count)
    p_index = index_ptr + rows[:, None] * top_k
    tl.store(p_index + position, index, mask=taken)
    if WITH_SCORES:
        tl.store(score_ptr + rows[:, None] * top_k + position, unordered(key), mask=taken)
    for i in range(0, top_k, BLOCK):
        o_k = i + tl.arange(0, BLOCK)
        tail = live[:, None] & (o_k[None, :] >= count[:, None]) & (o_k < top_k)[None, :]
        tl.store(p_index + o_k[None, :], -1, mask=tail)
        if WITH_SCORES:
            tl.store(score_ptr + rows[:, None] * top_k + o_k[None, :], float("-inf"), mask=tail)
    tl.store(count_ptr + rows, count, mask=live)
    tl.store(nan_ptr + rows, nans, mask=live)
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
    _launch(problem, candidates, keys, filled, threshold, results, row0, top_k, plan, plan.capacity, False)


def launch_select_table(
    problem: Problem,
    scores: torch.Tensor,
    filled: torch.Tensor,
    results: Results,
    row0: int,
    top_k: int,
    plan: Plan,
) -> None:
    """Write the results of rows row0 .. row0+R-1 from their scores float32 [R, S], S <= plan.capacity."""
    S = problem.num_keys
    _launch(problem, filled, scores, filled, filled, results, row0, top_k, plan, S, True)


def _launch(
    problem: Problem,
    candidates: torch.Tensor,
    keys: torch.Tensor,
    filled: torch.Tensor,
    threshold: torch.Tensor,
    results: Results,
    row0: int,
    top_k: int,
    plan: Plan,
    capacity: int,
    table: bool,
) -> None:
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
        capacity,
        top_k,
        WITH_SCORES=results.scores is not None,
        TABLE=table,
        C=plan.capacity,
        ROWS=plan.row_group,
        BLOCK=max(256 // plan.row_group, 16),
        num_warps=min(16, max(4, plan.capacity // 1024)),
    )
