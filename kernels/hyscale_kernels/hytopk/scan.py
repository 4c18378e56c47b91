"""Stage 2, scan: every score is computed, compared with the row's threshold, and forgotten.

What leaves the kernel is one bit a key: 1 where the score reaches the threshold or is NaN (NaN is
counted and dropped by the rescoring; the comparison that admits it costs nothing). Thirty-two keys make
a word, so the map is 1/32 the size of a score table and is bounded by the plan's key chunk.

Measured on an H200: appending candidates from here costs 20 to 35 % even when they are rare, because
the predicated code is issued for every element; the bitmap costs 2 %.
"""

import torch
import triton
import triton.language as tl

from .hopper import launch_hopper_scan
from .plan import Plan, ceil_div
from .problem import Problem
from .prune import TileList
from .score import key_scale, load_keys_transposed, tile_scores, tile_window


@triton.jit
def window_bits(lo, hi, first):
    """uint32 mask of the keys first .. first+31 that lie in [lo, hi)."""
    below = tl.minimum(tl.maximum(lo - first, 0), 32).to(tl.uint64)
    above = tl.minimum(tl.maximum(hi - first, 0), 32).to(tl.uint64)
    one = tl.full(below.shape, 1, tl.uint64)
    return tl.where(hi > lo, ((one << above) - 1) & ~((one << below) - 1), 0).to(tl.uint32)


@triton.jit(do_not_specialize=["row0", "R", "S", "key0", "key1", "segment", "words", "blocks"])
def _scan_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    bitmap_ptr,
    block_ptr,
    length_ptr,
    row0,
    R,
    S,
    key0,
    key1,
    segment,
    words,
    blocks,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    LISTED: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Bitmap words of row tile program_id(0), key segment program_id(1) of the chunk [key0, key1).

    Only tiles that some row's window meets are written; compaction reads no other word. With LISTED they are
    those of the row tile's list (prune.py), shared evenly.
    """
    o_r = tl.program_id(0) * BT + tl.arange(0, BT)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    rows = (row0 + o_r).to(tl.int64)
    lo = tl.load(lo_ptr + rows)
    hi = tl.load(scan_hi_ptr + o_r)
    threshold = tl.load(threshold_ptr + o_r)
    first, last = tile_window(lo, hi)
    begin = key0 + tl.program_id(1) * segment
    finish = tl.minimum(tl.minimum(begin + segment, key1), last)
    begin = tl.maximum(begin, key0 + (first - key0) // BS * BS)
    tile = 0
    tiles = (finish - begin + BS - 1) // BS
    if LISTED:
        length = tl.load(length_ptr + tl.program_id(0))
        share = (length + tl.num_programs(1) - 1) // tl.num_programs(1)
        tile = tl.program_id(1) * share
        tiles = tl.minimum(tile + share, length)
        p_block = block_ptr + tl.program_id(0).to(tl.int64) * blocks
    o_w = tl.arange(0, BS // 32)
    for i in range(tile, tiles):
        s = begin + i * BS
        if LISTED:
            s = key0 + tl.load(p_block + i) * BS
        keys = tl.minimum(s + tl.arange(0, BS), S - 1).to(tl.int64)
        b_k = load_keys_transposed(k_ptr, k_stride, keys, D, D_PAD)
        score = tile_scores(
            q_ptr, q_stride_t, q_stride_h, w_ptr, w_stride_t, rows, b_k, H, D, D_PAD, BT, BS, STAGES
        )
        if HAS_SCALE:
            score = score * key_scale(k_scale_ptr, keys)[None, :]
        kept = tl.where(score < threshold[:, None], 0, 1).to(tl.uint32)
        kept = tl.reshape(kept, (BT, BS // 32, 32)) << tl.arange(0, 32).to(tl.uint32)[None, None, :]
        word = tl.sum(kept, axis=2) & window_bits(lo[:, None], hi[:, None], s + 32 * o_w[None, :])
        o_word = (s - key0) // 32 + o_w
        pointers = bitmap_ptr + o_r.to(tl.int64)[:, None] * words + o_word[None, :]
        tl.store(pointers, word.to(tl.int32, bitcast=True), mask=live[:, None] & (o_word < words)[None, :])


def launch_scan(
    problem: Problem,
    scan_hi: torch.Tensor,
    threshold: torch.Tensor,
    bitmap: torch.Tensor,
    row0: int,
    key0: int,
    key1: int,
    plan: Plan,
    left: TileList | None = None,
) -> None:
    """Fill bitmap int32 [R, words] for rows row0 .. row0+R-1 and keys [key0, key1).

    key0 is a multiple of plan.tile_keys; scan_hi and threshold are the chunk's, [R]. ``left`` lists the key
    tiles to scan, where some may be left out: their words must be 0.
    """
    if plan.consumers:
        launch_hopper_scan(problem, scan_hi, threshold, bitmap, row0, key0, key1, plan, left)
        return
    R, words = bitmap.shape
    segment = plan.segment_keys(R, key1 - key0)
    _scan_kernel[(ceil_div(R, plan.tile_rows), ceil_div(key1 - key0, segment))](
        *problem.pointers(),
        problem.lo,
        scan_hi,
        threshold,
        bitmap,
        *((scan_hi, scan_hi) if left is None else left),  # not looked at unless LISTED
        row0,
        R,
        problem.num_keys,
        key0,
        key1,
        segment,
        words,
        0 if left is None else left.blocks.shape[1],
        *problem.strides(),
        **problem.constants(),
        LISTED=left is not None,
        BT=plan.tile_rows,
        BS=plan.tile_keys,
        STAGES=plan.stages,
        **plan.scan_options(),
    )
