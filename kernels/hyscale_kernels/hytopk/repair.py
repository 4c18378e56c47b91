"""Stage 7, repair: rows whose threshold missed are selected without one, exactly, on the device.

All keys of a pending row stream by in ascending order and a running top K is kept: keys that beat the K-th
best so far are appended to a buffer, and a full buffer is cut back to its K best. A later key that only
equals the K-th best loses by the tie rule. No input can overflow this; it is the reason that overflow
elsewhere never truncates.

When few rows are pending, several programs share the keys of one row, each in a buffer of its own; the
candidate buffers of all rows are free by now. A last kernel merges the parts: they are adjacent in memory
and in key order, so the K best of their concatenation are the row's.

A buffer is written and read by the same program; every change of role is fenced by a barrier.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan
from .plateau import walk
from .problem import Problem, Results
from .rank import best, load_columns, place, ranks, row_pointer
from .score import NEVER, load_query, load_weights


@triton.jit(do_not_specialize=["row0", "R"])
def _list_kernel(pending_ptr, list_ptr, total_ptr, row0, R, BLOCK: tl.constexpr):
    """The rows of the chunk that are still pending, ascending, and how many they are. One program."""
    total = 0
    for i in tl.range(0, R, BLOCK, num_stages=1):
        o_r = i + tl.arange(0, BLOCK)
        still = (tl.load(pending_ptr + row0 + o_r, mask=o_r < R, other=0) == 1).to(tl.int32)
        tl.store(list_ptr + total + tl.cumsum(still, axis=0) - 1, o_r, mask=still != 0)
        total += tl.sum(still)
    tl.store(total_ptr, total)


@triton.jit
def _splits(total, buffers, MOST: tl.constexpr):
    """Programs that share one of ``total`` pending rows, given ``buffers`` buffers."""
    return tl.minimum(buffers // tl.maximum(total, 1), MOST)


@triton.jit
def _keep_best(p_key, p_index, used, top_k, BLOCK: tl.constexpr):
    """Move the top_k best of the first ``used`` buffered keys to the front.

    Returns (how many there are, a value that all of them reach).
    """
    none = tl.zeros((1,), tl.int32)
    p_row = p_key + tl.zeros((1, 1), tl.int32)
    present, bar, room = best(p_row, none + used, top_k, 1, BLOCK)
    above = none
    equal = none
    for i in tl.range(0, used, BLOCK, num_stages=1):
        o_c = (i + tl.arange(0, BLOCK))[None, :]
        key = load_columns(p_row, o_c, none + used)
        index = tl.load(p_index + o_c, mask=o_c < used, other=0)
        taken, position, above, equal = ranks(key, bar, room, above, equal)
        # Columns move left only, so a block overwrites nothing that a later block reads.
        tl.debug_barrier()
        tl.store(p_key + position, key, mask=taken)
        tl.store(p_index + position, index, mask=taken)
        tl.debug_barrier()
    return tl.min(tl.minimum(present, top_k)), tl.max(bar)


@triton.jit(do_not_specialize=["row0", "S", "buffers", "capacity", "top_k"])
def _stream_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    hi_ptr,
    list_ptr,
    total_ptr,
    buffer_index_ptr,
    buffer_key_ptr,
    part_nan_ptr,
    row0,
    S,
    buffers,
    capacity,
    top_k,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The top_k best keys of one part of one pending row, in buffer program_id(0), NEVER behind them."""
    p = tl.program_id(0)
    total = tl.load(total_ptr)
    splits = _splits(total, buffers, MOST)
    if p < total * splits:
        row = (row0 + tl.load(list_ptr + p // splits)).to(tl.int64)
        lo = tl.load(lo_ptr + row)
        hi = tl.load(hi_ptr + row)
        size = ((hi - lo + splits - 1) // splits + N - 1) // N * N
        first = lo + tl.minimum((p % splits).to(tl.int64) * size, hi - lo).to(tl.int32)
        last = tl.minimum(first.to(tl.int64) + size, hi).to(tl.int32)
        b_q = load_query(q_ptr, q_stride_t, q_stride_h, row, H, H_PAD, D, D_PAD)
        b_w = load_weights(w_ptr, w_stride_t, row, H, H_PAD, N)
        p_index = row_pointer(buffer_index_ptr, p, capacity, BLOCK)
        p_key = row_pointer(buffer_key_ptr, p, capacity, BLOCK)
        used = 0
        nans = 0
        bar = NEVER
        for s in tl.range(first, last, N, num_stages=1):
            if used + N > capacity:
                tl.debug_barrier()
                used, bar = _keep_best(p_key, p_index, used, top_k, BLOCK)
            key = walk(b_q, b_w, k_ptr, k_scale_ptr, s, S, k_stride, HAS_SCALE, H, H_PAD, D, D_PAD, N)
            o_s = s + tl.arange(0, N)
            nans += tl.sum(((o_s < last) & (key == NEVER)).to(tl.int32))
            better = ((o_s < last) & (key > bar)).to(tl.int32)
            position = used + tl.cumsum(better, axis=0) - 1
            tl.store(p_key + position, key, mask=better != 0)
            tl.store(p_index + position, o_s, mask=better != 0)
            used += tl.sum(better)
        tl.debug_barrier()
        used, bar = _keep_best(p_key, p_index, used, top_k, BLOCK)
        for i in tl.range(used, capacity, BLOCK, num_stages=1):
            o_c = i + tl.arange(0, BLOCK)
            tl.store(p_key + o_c, NEVER, mask=o_c < capacity)
        tl.store(part_nan_ptr + p, nans)


@triton.jit(do_not_specialize=["row0", "buffers", "capacity", "top_k"])
def _merge_kernel(
    list_ptr,
    total_ptr,
    buffer_index_ptr,
    buffer_key_ptr,
    part_nan_ptr,
    index_ptr,
    count_ptr,
    score_ptr,
    nan_ptr,
    pending_ptr,  # not read: one of Results.pointers()
    row0,
    buffers,
    capacity,
    top_k,
    WITH_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The result of the program_id(0)-th pending row, from its parts.

    Columns beyond the count are -1 (and -inf): selection wrote the whole row so.
    """
    p = tl.program_id(0)
    total = tl.load(total_ptr)
    if p < total:
        splits = _splits(total, buffers, MOST)
        row = (row0 + tl.load(list_ptr + p)).to(tl.int64)
        none = tl.zeros((1,), tl.int32)
        last = none + splits * capacity
        part = p * splits
        p_row = row_pointer(buffer_key_ptr, part, capacity, BLOCK) + tl.zeros((1, 1), tl.int32)
        p_held = row_pointer(buffer_index_ptr, part, capacity, BLOCK) + tl.zeros((1, 1), tl.int32)
        present, bar, room = best(p_row, last, top_k, 1, BLOCK)
        p_out = index_ptr + row * top_k + tl.zeros((1, 1), tl.int32)
        p_score = score_ptr + row * top_k + tl.zeros((1, 1), tl.int32)
        place(p_row, p_held, last, bar, room, none == 0, p_out, p_score, WITH_SCORES, 1, BLOCK)
        tl.store(count_ptr + row, tl.min(tl.minimum(present, top_k)))
        o_m = tl.arange(0, MOST)
        tl.store(nan_ptr + row, tl.sum(tl.load(part_nan_ptr + part + o_m, mask=o_m < splits, other=0)))


def launch_repair(
    problem: Problem,
    candidates: torch.Tensor,
    keys: torch.Tensor,
    results: Results,
    row0: int,
    R: int,
    top_k: int,
    plan: Plan,
) -> None:
    """Select the rows among row0 .. row0+R-1 that are still pending, in the buffers [>= R, capacity]."""
    buffers = candidates.shape[0]
    pending, part_nans = (torch.empty(buffers, dtype=torch.int32, device=problem.device) for _ in range(2))
    total = torch.empty(1, dtype=torch.int32, device=problem.device)
    _list_kernel[(1,)](results.pending, pending, total, row0, R, BLOCK=1024, num_warps=4)
    _stream_kernel[(buffers,)](
        *problem.pointers(),
        problem.lo,
        problem.hi,
        pending,
        total,
        candidates,
        keys,
        part_nans,
        row0,
        problem.num_keys,
        buffers,
        plan.capacity,
        top_k,
        *problem.strides(),
        **problem.constants(),
        H_PAD=problem.padded_heads(),
        N=plan.gather,
        BLOCK=plan.columns(),
        MOST=plan.repair_splits,
        num_warps=4,
    )
    _merge_kernel[(R,)](
        pending,
        total,
        candidates,
        keys,
        part_nans,
        *results.pointers(),
        row0,
        buffers,
        plan.capacity,
        top_k,
        WITH_SCORES=results.scores is not None,
        BLOCK=plan.columns(),
        MOST=plan.repair_splits,
        num_warps=4,
    )
