"""Stage 3, compaction: the set bits of the bitmap become candidate keys, ascending in each row.

Key chunks are compacted in ascending order and append to the row's list, so the list stays sorted
without atomics. A full buffer stops the writing and never the counting: the row is then repaired.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan, ceil_div
from .problem import Problem


@triton.jit
def popcount(x):
    """Set bits of each uint32, as int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["row0", "R", "key0", "key1", "words", "capacity"])
def _compact_kernel(
    bitmap_ptr,
    lo_ptr,
    scan_hi_ptr,
    filled_ptr,
    candidate_ptr,
    row0,
    R,
    key0,
    key1,
    words,
    capacity,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Append the candidates of the chunk [key0, key1) to ROWS rows a program."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    # The part of each row's window that lies in this chunk, in words: [first, last).
    lo = tl.maximum(tl.load(lo_ptr + row0 + o_r), key0) - key0
    hi = tl.minimum(tl.load(scan_hi_ptr + o_r), key1) - key0
    some = live & (hi > lo)
    first = tl.where(some, lo // 32, words)
    last = tl.where(some, (hi + 31) // 32, 0)
    filled = tl.load(filled_ptr + o_r)
    p_bitmap = bitmap_ptr + o_r.to(tl.int64)[:, None] * words
    p_out = candidate_ptr + o_r.to(tl.int64)[:, None] * capacity
    for i in range(tl.min(first), tl.max(last), WORDS):
        o_w = i + tl.arange(0, WORDS)
        inside = (o_w[None, :] >= first[:, None]) & (o_w[None, :] < last[:, None])
        word = tl.load(p_bitmap + o_w[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
        count = popcount(word)
        position = filled[:, None] + tl.cumsum(count, axis=1) - count
        filled += tl.sum(count, axis=1)
        while tl.max((word != 0).to(tl.int32)) > 0:
            lowest = word & (~word + 1)
            # The exponent of a power of two as a float32 is the number of its only set bit.
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            key = key0 + o_w[None, :] * 32 + bit
            tl.store(p_out + position, key, mask=(word != 0) & (position < capacity))
            position += 1
            word = word & (word - 1)
    tl.store(filled_ptr + o_r, filled, mask=live)


def launch_compact(
    problem: Problem,
    bitmap: torch.Tensor,
    scan_hi: torch.Tensor,
    filled: torch.Tensor,
    candidates: torch.Tensor,
    row0: int,
    key0: int,
    key1: int,
    plan: Plan,
) -> None:
    """Append to candidates int32 [R, capacity] and add to filled int32 [R] what the bitmap holds."""
    R, words = bitmap.shape
    _compact_kernel[(ceil_div(R, plan.row_group),)](
        bitmap,
        problem.lo,
        scan_hi,
        filled,
        candidates,
        row0,
        R,
        key0,
        key1,
        words,
        plan.capacity,
        ROWS=plan.row_group,
        WORDS=128 if plan.row_group == 1 else 32,
        num_warps=4 if plan.row_group > 1 else 1,
    )
