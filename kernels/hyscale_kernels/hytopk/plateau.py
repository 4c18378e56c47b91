"""Stage 6, plateau: rows that stopped short of a wide plateau of equal scores take what they miss from it.

Such a row holds every key above the plateau and lacks some on it, the smallest. Its keys are scored again
from the left until enough equal ones are found; the held keys further right follow. On the wide plateaus
that cause this, a short walk is enough. Rows whose plateau turns out too small stay pending for repair.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan
from .problem import Problem, Results
from .rank import row_pointer, survey
from .score import (
    NEVER,
    key_scale,
    load_keys,
    load_query,
    load_weights,
    ordered,
    row_scores,
    unordered,
)


@triton.jit
def walk(
    b_q,
    b_w,
    k_ptr,
    k_scale_ptr,
    s,
    S,
    k_stride,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """Ordered scores [N] of keys s .. s+N-1 for one query (beyond S: of key S-1)."""
    keys = tl.minimum(s + tl.arange(0, N), S - 1).to(tl.int64)
    b_k = load_keys(k_ptr, k_stride, keys, D, D_PAD)
    score = row_scores(b_q, b_w, b_k, H, H_PAD, N)
    if HAS_SCALE:
        score = score * key_scale(k_scale_ptr, keys)
    return ordered(score)


@triton.jit(do_not_specialize=["row0", "S", "capacity", "top_k"])
def _plateau_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    hi_ptr,
    candidate_ptr,
    key_ptr,
    filled_ptr,
    plateau_ptr,
    index_ptr,
    count_ptr,
    score_ptr,
    nan_ptr,  # not read: one of Results.pointers()
    pending_ptr,
    row0,
    S,
    capacity,
    top_k,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill row program_id(0) of the chunk if it is pending, has a plateau, and holds all above it."""
    r = tl.program_id(0)
    row = (row0 + r).to(tl.int64)
    plateau = tl.load(plateau_ptr + r)
    filled = tl.load(filled_ptr + r)
    if (tl.load(pending_ptr + row) != 0) & (plateau != NEVER) & (filled <= capacity):
        lo = tl.load(lo_ptr + row)
        hi = tl.load(hi_ptr + row)
        b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
        b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
        p_index = row_pointer(candidate_ptr, r, capacity, BLOCK)
        p_key = row_pointer(key_ptr, r, capacity, BLOCK)
        p_out = index_ptr + row * top_k
        p_score = score_ptr + row * top_k
        p_row = p_key + tl.zeros((1, 1), tl.int32)
        held, _, _ = survey(p_row, tl.zeros((1,), tl.int32) + filled, 1, BLOCK)
        missing = top_k - tl.sum(held)
        s = lo
        used = 0
        while (s < hi) & (missing > 0):
            key = walk(b_q, b_w, k_ptr, k_scale_ptr, s, S, k_stride, HAS_SCALE, H, H_PAD, D, D_PAD, N)
            o_s = s + tl.arange(0, N)
            equal = ((o_s < hi) & (key == plateau)).to(tl.int32)
            equal = tl.where(tl.cumsum(equal, axis=0) <= missing, equal, 0)
            taken = equal | ((o_s < hi) & (key > plateau)).to(tl.int32)
            position = used + tl.cumsum(taken, axis=0) - 1
            tl.store(p_out + position, o_s, mask=taken != 0)
            if WITH_SCORES:
                tl.store(p_score + position, unordered(key), mask=taken != 0)
            used += tl.sum(taken)
            missing -= tl.sum(equal)
            s += N
        # A row still missing keys has written less than repair will write over it.
        if missing == 0:
            for i in tl.range(0, filled, BLOCK, num_stages=1):
                o_c = i + tl.arange(0, BLOCK)
                key = tl.load(p_key + o_c, mask=o_c < filled, other=NEVER)
                index = tl.load(p_index + o_c, mask=o_c < filled, other=0)
                right = ((key != NEVER) & (index >= s)).to(tl.int32)
                position = used + tl.cumsum(right, axis=0) - 1
                tl.store(p_out + position, index, mask=right != 0)
                if WITH_SCORES:
                    tl.store(p_score + position, unordered(key), mask=right != 0)
                used += tl.sum(right)
            tl.store(count_ptr + row, used)
            tl.store(pending_ptr + row, 2)


def launch_plateau(
    problem: Problem,
    candidates: torch.Tensor,
    keys: torch.Tensor,
    filled: torch.Tensor,
    plateau: torch.Tensor,
    results: Results,
    row0: int,
    top_k: int,
    plan: Plan,
) -> None:
    """Fill the pending rows among row0 .. row0+R-1 that a plateau completes, from their candidates."""
    _plateau_kernel[(filled.shape[0],)](
        *problem.pointers(),
        problem.lo,
        problem.hi,
        candidates,
        keys,
        filled,
        plateau,
        *results.pointers(),
        row0,
        problem.num_keys,
        plan.capacity,
        top_k,
        *problem.strides(),
        **problem.constants(),
        WITH_SCORES=results.scores is not None,
        H_PAD=problem.padded_heads(),
        N=plan.gather,
        BLOCK=plan.columns(),
        num_warps=4,
    )
