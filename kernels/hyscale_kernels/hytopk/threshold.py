"""Stage 1, threshold: a score that about K to 2 K keys of a row reach, guessed from a sample.

Each row tile scores one strided, jittered sample of the keys its rows can see; where the scores are in a
table, each row samples its own instead. A row then takes the m-th best of the samples inside its own
window, where m lies CAUTION standard deviations above the number of samples expected among the row's K
best. The guess may be wrong: a row that keeps too few or too many candidates is repaired, so the
threshold decides speed and never the result.

Rows that need no threshold (window not longer than the candidate buffer) get -inf: every key is kept.

A plateau of equal scores wider than the buffer (relu makes them: whole rows of exact zeros) would flood
any threshold at its height. A row whose sample shows one keeps only what lies above it, and remembers
the height: repair then takes the missing keys from the plateau, smallest first, and stops early.
"""

import torch
import triton
import triton.language as tl

from . import plan as sizes
from .plan import ROW_WARPS, Plan, ceil_div
from .problem import Problem
from .rank import nth_best, row_pointer, survey
from .score import NEVER, key_scale, load_keys_transposed, ordered, tile_scores, tile_window, unordered

CAUTION = tl.constexpr(sizes.CAUTION)


@triton.jit
def sample_keys(i, lo, hi, samples):
    """The key of sample ``i`` of ``samples`` over [lo, hi), hi > lo: strided, jittered inside its stride.

    All in 32 bits: ``samples`` is at most 2**15, so that its products with a remainder below it fit.
    """
    stride = (hi - lo) // samples
    rest = ((hi - lo) % samples).to(tl.uint32)
    extra = i.to(tl.uint32) * rest // samples.to(tl.uint32)
    jitter = tl.umulhi(i.to(tl.uint32) * 2654435769, stride.to(tl.uint32))
    return lo + i * stride + (extra + jitter).to(tl.int32)


@triton.jit(do_not_specialize=["row0", "R", "samples", "capacity"])
def _sample_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    lo_ptr,
    hi_ptr,
    sample_ptr,
    row0,
    R,
    samples,
    capacity,
    q_stride_t,
    q_stride_h,
    k_stride,
    w_stride_t,
    HAS_SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Ordered scores int32 [R, samples] of row tile program_id(0), sample block program_id(1)."""
    o_r = tl.minimum(tl.program_id(0) * BT + tl.arange(0, BT), R - 1)
    lo = tl.load(lo_ptr + row0 + o_r)
    hi = tl.load(hi_ptr + row0 + o_r)
    if tl.max(hi - lo) > capacity:
        first, last = tile_window(lo, hi)
        o_i = tl.program_id(1) * BS + tl.arange(0, BS)
        keys = sample_keys(o_i, first, last, samples).to(tl.int64)
        b_k = load_keys_transposed(k_ptr, k_stride, keys, D, D_PAD)
        rows = (row0 + o_r).to(tl.int64)
        score = tile_scores(
            q_ptr, q_stride_t, q_stride_h, w_ptr, w_stride_t, rows, b_k, H, D, D_PAD, BT, BS, STAGES
        )
        if HAS_SCALE:
            score = score * key_scale(k_scale_ptr, keys)[None, :]
        inside = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None])
        p_row = row_pointer(sample_ptr, o_r, samples, BS)[:, None]
        tl.store(p_row + o_i[None, :], tl.where(inside, ordered(score), NEVER))


@triton.jit(do_not_specialize=["row0", "R", "columns", "samples", "capacity", "top_k"])
def _threshold_kernel(
    table_ptr,
    sample_ptr,
    lo_ptr,
    hi_ptr,
    scan_hi_ptr,
    threshold_ptr,
    plateau_ptr,
    filled_ptr,
    row0,
    R,
    columns,
    samples,
    capacity,
    top_k,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Threshold, plateau, end of the window to scan, and reset candidate count of ROWS rows a program.

    With TABLE the samples are first taken from the table of ordered scores [R, columns].
    """
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    lo = tl.load(lo_ptr + row0 + o_r)
    hi = tl.load(hi_ptr + row0 + o_r)
    length = hi - lo
    guess = live & (length > capacity)
    threshold = tl.zeros((ROWS,), tl.float32) + float("-inf")
    plateau = tl.zeros((ROWS,), tl.int32) + NEVER
    if tl.max(guess.to(tl.int32)) > 0:
        p_row = row_pointer(sample_ptr, o_r, samples, BLOCK)[:, None]
        last = tl.where(guess, samples, 0)
        if TABLE:
            p_table = table_ptr + o_r.to(tl.int64)[:, None] * columns
            for i in range(0, samples, BLOCK):
                o_i = (i + tl.arange(0, BLOCK))[None, :]
                taken = o_i < last[:, None]
                key = tl.load(p_table + sample_keys(o_i, lo[:, None], hi[:, None], samples), mask=taken)
                tl.store(p_row + o_i, key, mask=taken)
            tl.debug_barrier()
        seen, low, high = survey(p_row, last, ROWS, BLOCK)
        guess = guess & (seen > 0)
        expected = top_k.to(tl.float32) * seen.to(tl.float32) / tl.maximum(length, 1).to(tl.float32)
        rank = (expected + CAUTION * tl.sqrt(expected) + CAUTION * CAUTION / 3.0).to(tl.int32) + 1
        # A rank a little too generous is as good. Too few samples for any rank keep every key.
        bar, reach, _ = nth_best(p_row, last, seen, low, high, rank, rank // 16, ROWS, BLOCK)
        guess = guess & (bar != NEVER)
        # More candidates expected than fit: only equal scores can have held the search up.
        share = reach.to(tl.float32) / tl.maximum(seen, 1).to(tl.float32)
        flood = (
            guess & (reach > rank + rank // 16) & (share * length.to(tl.float32) > capacity.to(tl.float32))
        )
        plateau = tl.where(flood, bar, plateau)
        threshold = tl.where(guess, unordered(tl.where(flood, bar + 1, bar)), threshold)
    # Nothing lies above a plateau of +inf: such a row has nothing to scan for and is repaired whole.
    peak = threshold != threshold
    tl.store(threshold_ptr + o_r, tl.where(peak, float("inf"), threshold), mask=live)
    tl.store(plateau_ptr + o_r, tl.where(peak, NEVER, plateau), mask=live)
    tl.store(scan_hi_ptr + o_r, tl.where(peak, lo, hi), mask=live)
    tl.store(filled_ptr + o_r, tl.zeros((ROWS,), tl.int32), mask=live)


def launch_threshold(
    problem: Problem,
    filled: torch.Tensor,
    row0: int,
    top_k: int,
    plan: Plan,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scan_hi int32, threshold float32, plateau int32), all [R], of rows row0 .. row0+R-1; filled := 0.

    plateau is the ordered score of the plateau just below the threshold, NEVER where there is none.
    ``table`` holds the rows' ordered scores, where there is one (``launch_dense``).
    """
    R, device = filled.shape[0], problem.device
    scan_hi = torch.empty(R, dtype=torch.int32, device=device)
    threshold = torch.empty(R, dtype=torch.float32, device=device)
    plateau = torch.empty(R, dtype=torch.int32, device=device)
    samples = torch.empty((R, plan.samples), dtype=torch.int32, device=device)
    if table is None:
        _sample_kernel[(ceil_div(R, plan.tile_rows), plan.samples // plan.tile_keys)](
            *problem.pointers(),
            problem.lo,
            problem.hi,
            samples,
            row0,
            R,
            plan.samples,
            plan.capacity,
            *problem.strides(),
            **problem.constants(),
            BT=plan.tile_rows,
            BS=plan.tile_keys,
            STAGES=plan.stages,
            **plan.scan_options(),
        )
    _threshold_kernel[(ceil_div(R, plan.row_group),)](
        samples if table is None else table,
        samples,
        problem.lo,
        problem.hi,
        scan_hi,
        threshold,
        plateau,
        filled,
        row0,
        R,
        0 if table is None else table.shape[1],
        plan.samples,
        plan.capacity,
        top_k,
        TABLE=table is not None,
        ROWS=plan.row_group,
        # Samples are read in whole blocks.
        BLOCK=min(plan.columns(), plan.samples & -plan.samples),
        num_warps=ROW_WARPS,
    )
    return scan_hi, threshold, plateau
