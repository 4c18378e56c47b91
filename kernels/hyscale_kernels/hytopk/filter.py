"""Filter: in short contexts, the table's scores that reach the row's threshold become candidates.

It stands in the place of stages 2 to 4: the scores are there, and are read once. Candidates are appended
in the order of their keys, NaN among them, so that selection counts it. A full buffer stops the writing
and never the counting: the row is then repaired.
"""

import torch
import triton
import triton.language as tl

from .plan import Plan, ceil_div
from .problem import Problem
from .rank import row_pointer
from .score import NEVER, ordered


@triton.jit(do_not_specialize=["row0", "R", "columns", "capacity"])
def _filter_kernel(
    table_ptr,
    lo_ptr,
    scan_hi_ptr,
    threshold_ptr,
    candidate_ptr,
    key_ptr,
    filled_ptr,
    row0,
    R,
    columns,
    capacity,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Candidates of ROWS rows a program from the table of ordered scores [R, columns], a multiple of BLOCK.

    Whole blocks are read, unmasked, so that loads are wide; what lies outside the window is not looked at.
    """
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = o_r < R
    o_r = tl.minimum(o_r, R - 1)
    lo = tl.load(lo_ptr + row0 + o_r)
    hi = tl.load(scan_hi_ptr + o_r)
    bar = ordered(tl.load(threshold_ptr + o_r))
    filled = tl.zeros((ROWS,), tl.int32)
    p_row = row_pointer(table_ptr, o_r, columns, BLOCK)[:, None]
    p_candidate = row_pointer(candidate_ptr, o_r, capacity, BLOCK)[:, None]
    p_key = row_pointer(key_ptr, o_r, capacity, BLOCK)[:, None]
    for block in tl.range(tl.min(lo) // BLOCK, (tl.max(hi) + BLOCK - 1) // BLOCK, num_stages=3):
        o_c = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
        key = tl.load(p_row + o_c)
        inside = (o_c >= lo[:, None]) & (o_c < hi[:, None])
        kept = (inside & ((key >= bar[:, None]) | (key == NEVER))).to(tl.int32)
        position = filled[:, None] + tl.cumsum(kept, axis=1) - kept
        fits = (kept != 0) & (position < capacity)
        tl.store(p_candidate + position, tl.broadcast_to(o_c, (ROWS, BLOCK)), mask=fits)
        tl.store(p_key + position, key, mask=fits)
        filled += tl.sum(kept, axis=1)
    tl.store(filled_ptr + o_r, filled, mask=live)


def launch_filter(
    problem: Problem,
    table: torch.Tensor,
    scan_hi: torch.Tensor,
    threshold: torch.Tensor,
    filled: torch.Tensor,
    row0: int,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(candidates, their ordered scores), int32 [buffers, capacity], of rows row0 .. row0+R-1, and filled.

    table (``launch_dense``), scan_hi, threshold and filled are the chunk's.
    """
    shape = (plan.buffers(filled.shape[0]), plan.capacity)
    candidates, keys = (torch.empty(shape, dtype=torch.int32, device=problem.device) for _ in range(2))
    _filter_kernel[(ceil_div(filled.shape[0], plan.row_group),)](
        table,
        problem.lo,
        scan_hi,
        threshold,
        candidates,
        keys,
        filled,
        row0,
        filled.shape[0],
        table.shape[1],
        plan.capacity,
        ROWS=plan.row_group,
        BLOCK=min(plan.columns(), 256),
        num_warps=1,
    )
    return candidates, keys
