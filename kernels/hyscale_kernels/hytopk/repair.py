"""Stage 6, repair: rows whose threshold missed are selected without one, exactly, on the device.

Two ways, one program a pending row:

* A row that stopped short of a plateau holds every key above the plateau and lacks some on it. Keys are
  scored again from the left until enough equal ones are found, and the held keys further right follow.
  On the wide plateaus that cause this, a short walk is enough.
* Otherwise all keys stream by in ascending order and a running top K is kept: keys that beat the K-th
  best so far are appended to the row's buffer, and a full buffer is cut back to its K best. A later key
  that only equals the K-th best loses by the tie rule. No input can overflow this; it is the reason
  that overflow elsewhere never truncates.

The buffer is the row's candidate buffer. It is written and read by the same program, so every change
of role is fenced by a barrier.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan
from .problem import Problem, Results
from .rank import best, load_ordered, ranks, reaching
from .score import NEVER, key_scale, load_keys, load_query, load_weights, ordered, row_scores, unordered


@triton.jit
def _walk(
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
    """Ordered scores [N] of keys s .. s+N-1 (beyond S: of key S-1)."""
    keys = tl.minimum(s + tl.arange(0, N), S - 1).to(tl.int64)
    b_k = load_keys(k_ptr, k_stride, keys, D, D_PAD)
    score = row_scores(b_q, b_w, b_k, H, H_PAD, N)
    if HAS_SCALE:
        score = score * key_scale(k_scale_ptr, keys)
    return ordered(score)


@triton.jit
def _keep_best(
    p_key,
    p_index,
    used,
    top_k,
    p_out,
    p_score,
    FINAL: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the top_k best of the first ``used`` buffered keys to the front, or (FINAL) to the outputs.

    Returns (how many there are, a value that all of them reach).
    """
    none = tl.zeros((1,), tl.int32)
    p_row = p_key + tl.zeros((1, 1), tl.int32)
    present, bar, room = best(p_row, none, none + used, top_k, False, 1, BLOCK)
    above = none
    equal = none
    for i in tl.range(0, used, BLOCK, num_stages=1):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_ordered(p_row, o_c, o_c < used, False)
        index = tl.load(p_index + o_c, mask=o_c < used, other=0)
        taken, position, above, equal = ranks(key, bar, room, above, equal)
        if FINAL:
            tl.store(p_out + position, index, mask=taken)
            if WITH_SCORES:
                tl.store(p_score + position, unordered(key), mask=taken)
        else:
            # Columns move left only, so a block overwrites nothing that a later block reads.
            tl.debug_barrier()
            tl.store(p_key + position, key, mask=taken)
            tl.store(p_index + position, index, mask=taken)
            tl.debug_barrier()
    return tl.min(tl.minimum(present, top_k)), tl.max(bar)


@triton.jit(do_not_specialize=["row0", "S", "capacity", "top_k"])
def _repair_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    hi_ptr,
    buffer_index_ptr,
    buffer_key_ptr,
    filled_ptr,
    plateau_ptr,
    index_ptr,
    count_ptr,
    score_ptr,
    nan_ptr,
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
    """Select row program_id(0) of the chunk if it is pending. Selection has left its outputs empty."""
    r = tl.program_id(0)
    row = (row0 + r).to(tl.int64)
    if tl.load(pending_ptr + row) != 0:
        lo = tl.load(lo_ptr + row)
        hi = tl.load(hi_ptr + row)
        b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
        b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
        p_index = buffer_index_ptr + r.to(tl.int64) * capacity
        p_key = buffer_key_ptr + r.to(tl.int64) * capacity
        p_out = index_ptr + row * top_k
        p_score = score_ptr + row * top_k
        filled = tl.load(filled_ptr + r)
        plateau = tl.load(plateau_ptr + r)
        missing = top_k
        if (plateau != NEVER) & (filled <= capacity):
            none = tl.zeros((1,), tl.int32)
            p_row = p_key + tl.zeros((1, 1), tl.int32)
            missing -= tl.sum(reaching(p_row, none, none + filled, none + (NEVER + 1), False, 1, BLOCK))
            s = lo
            used = 0
            while (s < hi) & (missing > 0):
                key = _walk(b_q, b_w, k_ptr, k_scale_ptr, s, S, k_stride, HAS_SCALE, H, H_PAD, D, D_PAD, N)
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
        if missing > 0:
            tl.debug_barrier()
            used = 0
            nans = 0
            bar = NEVER
            for s in tl.range(lo, hi, N, num_stages=1):
                if used + N > capacity:
                    tl.debug_barrier()
                    used, bar = _keep_best(p_key, p_index, used, top_k, p_out, p_score, False, False, BLOCK)
                key = _walk(b_q, b_w, k_ptr, k_scale_ptr, s, S, k_stride, HAS_SCALE, H, H_PAD, D, D_PAD, N)
                o_s = s + tl.arange(0, N)
                nans += tl.sum(((o_s < hi) & (key == NEVER)).to(tl.int32))
                better = ((o_s < hi) & (key > bar)).to(tl.int32)
                position = used + tl.cumsum(better, axis=0) - 1
                tl.store(p_key + position, key, mask=better != 0)
                tl.store(p_index + position, o_s, mask=better != 0)
                used += tl.sum(better)
            tl.debug_barrier()
            # Columns beyond the count are -1 (and -inf): selection wrote the whole row so.
            used, bar = _keep_best(p_key, p_index, used, top_k, p_out, p_score, True, WITH_SCORES, BLOCK)
            tl.store(count_ptr + row, used)
            tl.store(nan_ptr + row, nans)


def launch_repair(
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
    """Select the pending rows among row0 .. row0+R-1, in their candidate buffers [R, capacity]."""
    _repair_kernel[(candidates.shape[0],)](
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
